"""Readings of a server: which are of the measured part, what follows from them, and the thread that takes them."""

from __future__ import annotations

import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtx.bench.cores import BusyProcess, CpuReading
from trtx.bench.phases import Span
from trtx.bench.readings import (
    READINGS,
    ForeignProcess,
    GpuReading,
    ServerReading,
    cpu_over,
    gpus_over,
    read_readings,
    requests_over,
    summed,
    write_readings,
)
from trtx.bench.trial_readings import Watch
from trtx.errors import UsageError
from trtx.stats.percentiles import binomial_tail

SECOND = 10**9
MEASURED = Span(10 * SECOND, 20 * SECOND)


def _reading(at_s: float, gpus: tuple[GpuReading, ...] | None = None, **ended: int) -> ServerReading:
    return ServerReading(round(at_s * SECOND), gpus, {"agg": ended} if ended else None)


def _gpu(temperature_c: int) -> GpuReading:
    return GpuReading("GPU 0", temperature_c=temperature_c)


def test_gpus_are_those_from_one_edge_of_the_measured_part_to_the_other() -> None:
    readings = [_reading(second + 0.5, (_gpu(second),)) for second in range(30)]
    found = gpus_over(readings, MEASURED)
    assert found is not None
    assert [gpu.temperature_c for gpu in found] == list(range(9, 21))


@pytest.mark.parametrize(
    "seconds",
    [(), (8, 15), (15, 21), (2, 15, 21), (8, 15, 28)],
    ids=["none", "no end", "no start", "start too early", "end too late"],
)
def test_an_edge_that_nobody_read_leaves_all_unknown(seconds: tuple[float, ...]) -> None:
    readings = [_reading(second, (_gpu(1),), a=int(second)) for second in seconds]
    assert gpus_over(readings, MEASURED) is None
    assert requests_over(readings, MEASURED, answered=0) is None


def test_gpus_may_be_unread_in_between_and_not_at_an_edge() -> None:
    known = [_reading(9, (_gpu(1),)), _reading(15, (_gpu(2),)), _reading(21, (_gpu(3),))]
    between, edge = ([*known[:place], replace(known[place], gpus=None), *known[place + 1 :]] for place in (1, 2))
    assert gpus_over(between, MEASURED) == (_gpu(1), _gpu(3))
    assert gpus_over(edge, MEASURED) is None
    no_gpu = [replace(one, gpus=()) for one in known]
    assert gpus_over(no_gpu, MEASURED) == ()


def _cpu(at_s: float, foreign_s: float) -> ServerReading:
    """Of two cores that are never idle: the rest is the run's."""
    return replace(_reading(at_s), cpu=CpuReading(2, 2 * at_s, 0.0, 2 * at_s, 0.0, 2 * at_s - foreign_s))


def test_cores_are_those_of_the_measured_part_alone() -> None:
    readings = [_cpu(1, 0), _cpu(9, 7), _cpu(15, 8), _cpu(21, 10), _cpu(25, 18)]
    found = cpu_over(readings, MEASURED)
    assert found is not None
    assert (found.total_s, found.foreign_s) == (24, pytest.approx(3))


def test_cores_may_be_unread_in_between_and_not_at_an_edge() -> None:
    known = [_cpu(9, 7), _cpu(15, 8), _cpu(21, 10)]
    for place in range(3):
        found = cpu_over([*known[:place], _reading(known[place].at_ns / SECOND), *known[place + 1 :]], MEASURED)
        assert found == (cpu_over(known, MEASURED) if place == 1 else None)
    assert cpu_over(known[1:], MEASURED) is None


def test_requests_are_those_since_the_start_until_the_last_reading() -> None:
    readings = [_reading(1, a=0, b=0), _reading(9, a=7, b=5), _reading(21, a=40, b=30), _reading(23, a=41, b=30)]
    assert requests_over(readings, MEASURED, answered=59) == {"agg": {"a": 34, "b": 25}}
    assert requests_over(readings, MEASURED, answered=60) is None  # others answered too


@pytest.mark.parametrize(
    "last",
    [_reading(21), _reading(21, a=40), _reading(21, a=40, b=30, c=1), _reading(21, a=40, b=2)],
    ids=["nobody says", "one is gone", "one came", "one began anew"],
)
def test_workers_that_are_not_the_same_all_the_time_are_not_counted(last: ServerReading) -> None:
    assert requests_over([_reading(9, a=7, b=5), last], MEASURED, answered=1) is None


def test_trials_are_summed_by_role_and_worker() -> None:
    assert summed([{"p": {"p0": 3}, "d": {"d0": 1, "d1": 2}}, {"p": {"p0": 4}, "d": {"d0": 5, "d1": 6}}]) == {
        "p": {"p0": 7}, "d": {"d0": 6, "d1": 8},
    }  # fmt: skip


GPUS = st.builds(
    GpuReading,
    name=st.text(max_size=8),
    sm_clock_mhz=st.none() | st.integers(0, 3000),
    max_sm_clock_mhz=st.none() | st.integers(0, 3000),
    clock_reasons=st.none() | st.tuples() | st.tuples(st.sampled_from(["idle", "thermal, by hardware"])),
    power_w=st.none() | st.floats(0, 2000),
    temperature_c=st.none() | st.integers(-20, 120),
    memory_used_bytes=st.none() | st.integers(0, 2**40),
    foreign=st.none()
    | st.lists(
        st.builds(
            ForeignProcess,
            st.integers(0, 2**22),
            st.none() | st.text(max_size=8),
            st.none() | st.floats(0, 100),
        ),
        max_size=2,
    ).map(tuple),
)
SECONDS = st.floats(0, 1e9)
CPUS = st.builds(
    CpuReading,
    st.integers(1, 512), SECONDS, SECONDS, SECONDS, SECONDS, SECONDS,
    st.lists(st.builds(BusyProcess, st.integers(0, 2**22), st.text(max_size=8), SECONDS), max_size=2).map(tuple),
    st.sampled_from(["run", "client", "unknown"]),
)  # fmt: skip
COUNTS = st.dictionaries(st.text(max_size=4), st.dictionaries(st.text(max_size=4), st.integers(0), max_size=2))


@given(
    st.lists(
        st.builds(
            ServerReading,
            st.integers(0, 2**62),
            st.none() | st.lists(GPUS, max_size=2).map(tuple),
            st.none() | COUNTS,
            cpu=st.none() | CPUS,
        ),
        max_size=3,
    ).map(tuple)
)
def test_readings_are_read_as_they_were_written(readings: tuple[ServerReading, ...]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        write_readings(Path(directory), readings)
        assert read_readings(Path(directory)) == readings


def test_a_trial_that_nobody_watched_has_no_readings(tmp_path: Path) -> None:
    assert read_readings(tmp_path) is None


def test_readings_that_can_not_be_read_are_told_by_their_field(tmp_path: Path) -> None:
    (tmp_path / READINGS.file).write_text('{"schema_version": 1, "readings": [{"at_ns": "8"}]}')
    with pytest.raises(UsageError, match=r"readings\.json .*readings\.0"):
        read_readings(tmp_path)


def test_a_watch_reads_as_it_is_entered_again_and_again_and_as_it_is_left() -> None:
    came, calls = threading.Semaphore(0), iter(range(10**6))

    def read() -> ServerReading:
        came.release()
        return ServerReading(next(calls), None, None)

    with Watch(read, every_s=0.001) as watch:
        for _ in range(3):
            assert came.acquire(timeout=20)
        before = len(watch.readings)
    found = [one.at_ns for one in watch.readings]
    assert found == list(range(len(found)))
    assert len(found) > before


def test_a_watch_that_is_left_at_once_has_a_reading_of_its_end() -> None:
    left = threading.Event()
    with Watch(lambda: ServerReading(int(left.is_set()), None, None), every_s=60) as watch:
        left.set()
    assert watch.readings[-1].at_ns == 1


def test_nobody_reads_what_can_not_be_read() -> None:
    with Watch(None) as watch:
        pass
    assert watch.readings == ()


def test_a_binomial_tail_by_hand() -> None:
    assert binomial_tail(4, 4, 0.5) == pytest.approx(1 / 16)
    assert binomial_tail(0, 4, 0.5) == pytest.approx(1 / 16)
    assert binomial_tail(3, 4, 0.5) == pytest.approx(5 / 16)
    assert binomial_tail(1, 4, 0.25) == pytest.approx(1 - 0.75**4)


@given(st.integers(1, 300), st.floats(0.01, 0.99), st.data())
def test_two_binomial_tails_make_a_whole(n: int, p: float, data: st.DataObject) -> None:
    above = data.draw(st.integers(0, n).filter(lambda k: k >= n * p), label="above") if n * p <= n else n
    below = above - 1
    if 0 <= below < n * p:
        assert binomial_tail(above, n, p) + binomial_tail(below, n, p) == pytest.approx(1)
    else:
        assert 0 <= binomial_tail(above, n, p) <= 1
