"""aiperf 0.13.0's error records, as it wrote them, in words."""

from __future__ import annotations

import pytest

from trtx.bench.failures import INCOMPLETE, count_reasons, describe, merge_reasons, reason

EVENT = (
    "SSEResponseError('Error occurred in SSE response: Unknown error in SSE response: SSEMessage(perf_ns={ns}, packets="
    "[SSEField(name=\\'event\\', value=\\'error\\'), SSEField(name=\\'data\\', value=\\'{data}\\')])')"
)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ({"type": INCOMPLETE, "message": "cut off: no [DONE]"}, "cut off: no [DONE]"),
        ({"code": 404, "type": "Not Found", "message": '{"error":{"message":"no m","code":404}}'}, "HTTP 404 no m"),
        ({"code": 503, "type": "Service Unavailable", "message": ""}, "HTTP 503 Service Unavailable"),
        (
            {
                "code": 502,
                "type": "SSEResponseError",
                "message": "SSEResponseError('Error occurred in SSE response: boom')",
            },
            "error in the answer: boom",
        ),
        (
            {
                "code": 502,
                "type": "SSEResponseError",
                "message": EVENT.replace("{ns}", "8306").replace("{data}", '{"message": "boom", "code": 500}'),
            },
            "error in the answer: boom",
        ),
        (
            {
                "type": "InvalidInferenceResultError",
                "message": "InvalidInferenceResultError('Invalid inference result: No responses were received')",
            },
            "empty answer",
        ),
        (
            {"type": "ServerDisconnectedError", "message": "ServerDisconnectedError('Server disconnected')"},
            "ServerDisconnectedError: Server disconnected",
        ),
        ({"type": "TimeoutError", "message": "TimeoutError()"}, "timed out: TimeoutError"),
        ({"type": None, "message": None}, "an error without a message"),
    ],
)
def test_each_kind_of_error_becomes_one_short_line(error: dict[str, object], expected: str) -> None:
    assert reason(error) == expected


def test_ids_make_no_two_reasons_of_one_and_status_codes_do() -> None:
    folded = [f"HTTP 500 Failed to fold stream for 5b6c4d1e-12ab-4f00-9c1d-00000000000{n}" for n in range(9)]
    assert [count for _, count in count_reasons([*folded, "HTTP 404 a", "HTTP 500 a"])] == [9, 1, 1]


def test_reasons_beyond_the_first_twenty_are_one_entry_and_no_request_is_lost() -> None:
    reasons = count_reasons(chr(0x100 + n) for n in range(30))
    assert len(reasons) == 21 and reasons[-1] == ("other reasons", 10)
    assert merge_reasons([reasons, reasons])[-1] == ("other reasons", 20)


def test_one_reason_is_told_alone_and_several_with_their_counts() -> None:
    assert describe((("HTTP 404 a", 16),)) == "HTTP 404 a"
    assert describe((("a", 3), ("b", 2), ("c", 1), ("d", 1)), most=2) == "3 × a; 2 × b; 2 × other reasons"
