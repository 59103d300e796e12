"""What follows from readings of cores: how much of their time others had while they were short."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtx.bench.cores import SHORT, STOLEN, BusyProcess, CpuReading, CpuUse, Scope, over_trials, used

CORES = 4
START = CpuReading(CORES, 1000.0, 600.0, 390.0, 0.0, 50.0)


def _after(
    before: CpuReading, run_s: float, foreign_s: float, *, stolen_s: float = 0.0, others: tuple[BusyProcess, ...] = ()
) -> CpuReading:
    """A second later."""
    return CpuReading(
        CORES,
        before.total_s + CORES,
        before.idle_s + CORES - run_s - foreign_s - stolen_s,
        before.processes_s + run_s + foreign_s,
        before.stolen_s + stolen_s,
        before.run_s + run_s,
        others,
    )


def _use(*readings: CpuReading) -> CpuUse:
    found = used(readings)
    assert found is not None
    return found


def test_what_others_use_counts_while_no_core_is_idle_and_not_else() -> None:
    short = _after(START, 2.0, 1.9)
    idle = _after(short, 2.0, 1.0)
    found = _use(START, short, idle)
    assert (found.cores, found.total_s, found.foreign_s) == (CORES, 2 * CORES, pytest.approx(1.9))
    assert found.foreign_share == pytest.approx(1.9 / 8)


def test_a_run_that_fills_the_cores_by_itself_is_disturbed_by_nobody() -> None:
    found = _use(START, _after(START, 4.0, 0.0))
    assert (found.foreign_s, found.foreign_share) == (0.0, 0.0)


def test_who_used_most_while_cores_were_short_is_told_by_name_and_the_hypervisor_too() -> None:
    compiler, editor = BusyProcess(7, "cc1plus", 1.2), BusyProcess(8, "vim", 0.1)
    short = _after(START, 2.0, 1.3, stolen_s=0.7, others=(compiler, editor))
    found = _use(START, short, _after(short, 0.0, 1.0, others=(editor,)))
    assert found.foreign_s == pytest.approx(2.0)
    assert found.by_user == {"cc1plus (pid 7)": 1.2, "vim (pid 8)": 0.1, STOLEN: pytest.approx(0.7)}


def test_cores_that_change_and_a_single_reading_tell_nothing() -> None:
    other = replace(_after(START, 1.0, 1.0), cores=CORES - 1)
    unknown = replace(_after(START, 1.0, 1.0), scope="unknown")
    assert used([]) is used([START]) is used([START, other]) is used([START, unknown]) is None


def test_trials_are_one_and_one_that_is_not_known_leaves_all_unknown() -> None:
    one = _use(START, _after(START, 2.0, 1.9, others=(BusyProcess(7, "cc1plus", 1.2),)))
    both = over_trials([one, one])
    assert both is not None
    assert (both.total_s, both.foreign_s, both.foreign_share) == (
        2 * one.total_s, pytest.approx(2 * one.foreign_s), pytest.approx(one.foreign_share),
    )  # fmt: skip
    assert both.by_user["cc1plus (pid 7)"] == pytest.approx(2.4)
    scopes: tuple[Scope, ...] = ("client", "unknown")
    assert over_trials([]) is over_trials([one, None]) is None
    assert all(over_trials([one, replace(one, scope=scope)]) is None for scope in scopes)


SECONDS = st.lists(st.tuples(st.floats(0, CORES), st.floats(0, CORES)), min_size=1, max_size=20)


@given(SECONDS)
def test_others_never_have_more_than_all_time_nor_more_than_they_used(seconds: list[tuple[float, float]]) -> None:
    fitted = [(run, min(foreign, CORES - run)) for run, foreign in seconds]
    readings = list(accumulate(fitted, lambda before, one: _after(before, *one), initial=START))
    found = _use(*readings)
    assert 0 <= found.foreign_share <= 1
    assert found.foreign_s <= sum(foreign for _, foreign in fitted) + 1e-6
    short = [now for before, now in pairwise(readings) if now.idle_s - before.idle_s <= (1 - SHORT) * CORES + 1e-6]
    assert found.foreign_s == 0 or short, "with idle cores all the time nobody takes anything"
