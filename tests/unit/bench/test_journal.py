from __future__ import annotations

from pathlib import Path

from trtx.bench import Journal, read_journal


def test_events_come_back_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.note("sweep_started", mode="agg")
    journal.note("cell_ended", cell="agg-c8", status="ok")
    events = read_journal(tmp_path)
    assert [event["event"] for event in events] == ["sweep_started", "cell_ended"]
    assert events[1]["cell"] == "agg-c8"


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.note("sweep_started", mode="agg")
    with journal.path.open("a") as file:
        file.write('{"event": "cell_en')
    assert [event["event"] for event in read_journal(tmp_path)] == ["sweep_started"]


def test_a_run_without_a_journal_has_no_events(tmp_path: Path) -> None:
    assert read_journal(tmp_path) == ()


def test_a_last_line_cut_short_is_cut_off_so_that_the_next_is_whole(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.note("first")
    with journal.path.open("ab") as file:
        file.write(b'{"event": "cut sh')
    journal.mend()
    journal.note("second")
    assert [event["event"] for event in read_journal(tmp_path)] == ["first", "second"]
