from __future__ import annotations

import resource
from pathlib import Path

import pytest

from trtx.bench import Journal, read_journal
from trtx.bench.files import write_text
from trtx.bench.journal import CellEnded, RunEnded, SweepStarted, TrialEnded

STARTED = SweepStarted(topology="agg", model="tiny", cells=("agg-c8",))


def test_events_come_back_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.note(STARTED)
    journal.note(CellEnded(cell="agg-c8", status="ok", failure=None))
    events = read_journal(tmp_path)
    assert events[0] == STARTED
    assert isinstance(events[1], CellEnded) and events[1].cell == "agg-c8"


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.note(STARTED)
    with journal.path.open("a") as file:
        file.write('{"event": "cell_en')
    assert [event.name() for event in read_journal(tmp_path)] == ["sweep_started"]


def test_a_run_without_a_journal_has_no_events(tmp_path: Path) -> None:
    assert read_journal(tmp_path) == ()


def test_a_last_line_cut_short_is_cut_off_so_that_the_next_is_whole(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.note(STARTED)
    with journal.path.open("ab") as file:
        file.write(b'{"event": "cut sh')
    journal.mend()
    journal.note(RunEnded())
    assert [event.name() for event in read_journal(tmp_path)] == ["sweep_started", "run_ended"]


def test_a_line_for_which_there_is_no_room_leaves_no_part_of_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.note(STARTED)
    whole = journal.path.read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, before[1]))  # as a disk that fills in mid line
    try:
        with pytest.raises(OSError, match="No space left"):
            journal.note(TrialEnded(cell="agg-c1", trial=1, aiperf_exit_code=0, restarted=None))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert journal.path.read_bytes() == whole
    journal.note(TrialEnded(cell="agg-c1", trial=1, aiperf_exit_code=0, restarted=None))
    assert [event.name() for event in read_journal(tmp_path)] == ["sweep_started", "trial_ended"]


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
