"""How long a sweep will take, from earlier runs and from nothing else."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtx.bench import Journal
from trtx.bench.journal import TopologyReady, TrialEnded, TrialStarted
from trtx.experiment import cells_ahead, estimate, read_history
from trtx.experiment.bench.estimate import History, PlannedCell, TrialDuration, Work
from trtx.experiment.directory import read_lock

GOLDEN = Path(__file__).parents[1] / "report" / "golden" / "run"
C1 = Work("paced tiny", "agg", 1, None, 64, 16, "")
C8 = replace(C1, concurrency=8)


def ahead(work: Work, requests: int = 10, trials: int = 1, starts: int = 1) -> PlannedCell:
    return PlannedCell(f"{work.topology}-c{work.concurrency}", work, requests, trials, starts)


def test_without_an_earlier_run_it_is_not_known() -> None:
    found = estimate([ahead(C1)], History(0))
    assert found.seconds is None
    assert found.sentence(Path("runs")) == "not known: no earlier run in runs/"


@pytest.mark.parametrize(
    "other",
    [
        {"served": "torch tiny"}, {"topology": "disagg"}, {"concurrency": 2}, {"isl": 65}, {"osl": 17},
        {"prompts": "3 turns a session"}, {"concurrency": None, "request_rate": 1.0},
    ],
)  # fmt: skip
def test_another_load_or_topology_tells_nothing(other: dict[str, object]) -> None:
    found = estimate([ahead(C1)], History(2, (TrialDuration(replace(C1, **other), 5.0, 10),)))  # type: ignore[arg-type]
    assert found.seconds is None
    assert found.sentence(Path("runs")) == "not known: none of 2 earlier runs in runs/ measured such a cell"


def test_what_is_known_and_what_is_not_are_both_said() -> None:
    history = History(1, (TrialDuration(C1, 20.0, 10),), (((C1.served, "agg"), 7.0),))
    found = estimate([ahead(C1, requests=30, trials=2), ahead(C8)], history)
    assert (found.seconds, found.unknown) == (2.0 * 30 * 2 + 7.0, ("agg-c8",))
    assert found.sentence(Path("runs")) == (
        "about 2 min for 1 of 2 cells, as earlier runs in runs/ took; not known for agg-c8"
    )


def test_a_topology_starts_once_for_all_its_cells() -> None:
    history = History(1, (TrialDuration(C1, 10.0, 10), TrialDuration(C8, 10.0, 10)), (((C1.served, "agg"), 5.0),))
    assert estimate([ahead(C1), ahead(C8)], history).seconds == 25.0
    again = [ahead(C1, trials=3, starts=3), ahead(C8, trials=3, starts=3)]
    assert estimate(again, history).seconds == 3 * 25.0, "or anew for each trial"


@given(
    st.lists(st.tuples(st.floats(0.1, 1e4), st.integers(1, 1000)), min_size=1, max_size=9),
    st.integers(1, 1000),
    st.integers(1, 10),
)
def test_it_lies_between_what_the_fastest_and_the_slowest_trial_took(
    took: list[tuple[float, int]], requests: int, trials: int
) -> None:
    history = History(1, tuple(TrialDuration(C1, seconds, count) for seconds, count in took))
    seconds = estimate([ahead(C1, requests, trials)], history).seconds
    paces = [seconds / count for seconds, count in took]
    assert seconds is not None
    assert min(paces) * 0.999 <= seconds / requests / trials <= max(paces) * 1.001


def test_a_real_run_tells_of_its_own_sweep(tmp_path: Path) -> None:
    """Of a plan that is as its own: the same engine, model and topologies."""
    run = Path(shutil.copytree(GOLDEN, tmp_path / "runs" / "earlier"))
    history = read_history(run.parent)
    spec = read_lock(run)
    served = history.trials[0].work.served
    assert served == "paced tiny-trained" or " " in served
    cells = [replace(cell, work=replace(cell.work, served=served)) for cell in cells_ahead(spec, _labels(spec.labels))]
    found = estimate(cells, history)
    assert found.seconds is not None and found.unknown == () and found.runs == 1
    events = (run / "journal.jsonl").read_text().splitlines()
    assert 0 < found.seconds < 60 * len(events)


def _labels(labels: tuple[str, ...]) -> list[tuple[str, None]]:
    return [(label, None) for label in labels]


def test_a_trial_that_was_broken_off_or_made_again_counts_as_what_it_took(tmp_path: Path) -> None:
    run = Path(shutil.copytree(GOLDEN, tmp_path / "runs" / "earlier"))
    before = read_history(run.parent)
    cell = next(line for line in (run / "journal.jsonl").read_text().splitlines() if "trial_started" in line)
    name = "agg-c1"
    assert name in cell
    (run / "journal.jsonl").unlink()
    journal = Journal(run)
    journal.note(TopologyReady(time=0.0, topology="agg", load_seconds=1.0, warm_up_seconds=0.5))
    journal.note(TrialStarted(time=10.0, cell=name, trial=1, argv=()))
    journal.note(TrialEnded(time=20.0, cell=name, trial=1, aiperf_exit_code=None, restarted=()))
    journal.note(TrialStarted(time=100.0, cell=name, trial=1, argv=()))  # with a warm-up that is too short
    journal.note(TrialEnded(time=104.0, cell=name, trial=1, aiperf_exit_code=0, restarted=()))
    journal.note(TrialStarted(time=105.0, cell=name, trial=1, argv=()))
    journal.note(TrialEnded(time=112.0, cell=name, trial=1, aiperf_exit_code=0, restarted=()))
    after = read_history(run.parent)
    assert [took.seconds for took in after.trials] == [12.0]
    assert after.starts == (((before.trials[0].work.served, "agg"), 1.5),)


def test_a_run_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.lock.yaml").write_text("load: [")
    assert read_history(tmp_path) == History(0)
    assert read_history(tmp_path / "no such directory") == History(0)
