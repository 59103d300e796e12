from __future__ import annotations

import resource
from pathlib import Path

import pytest

from trtx.bench import Journal, read_journal
from trtx.bench.files import write_text


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


def test_a_line_for_which_there_is_no_room_leaves_no_part_of_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.note("sweep_started", mode="agg")
    whole = journal.path.read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, before[1]))  # as a disk that fills in mid line
    try:
        with pytest.raises(OSError, match="No space left"):
            journal.note("trial_ended", cell="agg-c1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert journal.path.read_bytes() == whole
    journal.note("trial_ended", cell="agg-c1")
    assert [event["event"] for event in read_journal(tmp_path)] == ["sweep_started", "trial_ended"]


def test_a_file_for_which_there_is_no_room_stays_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "cell.json"
    write_text(path, "old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_text(path, "new" * 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
