"""What a worker refuses is in its log, as many lines of it as clients can't make a flood of."""

from __future__ import annotations

import pytest

from trtx.worker.requests.refusal_log import MOST_CHARACTERS, MOST_LINES, PERIOD_SECONDS, RefusalLog


def test_so_many_refusals_of_a_period_are_told_then_that_the_others_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 100.0
    log = RefusalLog(lambda: now)
    for number in range(3 * MOST_LINES):
        log.tell(f"id-{number}", "n is 2, expected 1")
    *told, last = [record.getMessage() for record in caplog.records]
    assert told == [f"request id-{number} refused: n is 2, expected 1" for number in range(MOST_LINES)]
    assert "only counted" in last
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    caplog.clear()
    now += PERIOD_SECONDS
    log.tell("id-later", "n is 3, expected 1")
    assert caplog.messages == ["request id-later refused: n is 3, expected 1"]


def test_what_a_client_wrote_makes_no_line_of_its_own_and_no_endless_one(caplog: pytest.LogCaptureFixture) -> None:
    RefusalLog().tell("id", "kwargs (a\n2026-01-01 ERROR all is lost\x1b[2J)" + "x" * 10**6)
    (said,) = caplog.messages
    assert "(a 2026-01-01 ERROR" in said
    assert said.isprintable()
    assert len(said) < MOST_CHARACTERS + 50
