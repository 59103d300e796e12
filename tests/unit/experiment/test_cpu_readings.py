"""Whose time of the cores is whose: a ``/proc`` that a script writes, and real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from trtx.bench.cores import BusyProcess, CpuReading
from trtx.experiment.cpu_readings import CpuReader
from trtx.topology import TOPOLOGY_VARIABLE

pytestmark = pytest.mark.slow

TICKS = os.sysconf("SC_CLK_TCK")
LAUNCHER = 100
KERNEL = 0x00200000


@dataclass
class Entry:
    parent: int
    is_run: bool
    own: int = 0
    children: int = 0
    started: int = 0
    flags: int = 0x00400040
    name: str = "python"
    environ: str = ""


@dataclass
class Machine:
    """A kernel's books, as ``/proc`` shows them."""

    root: Path
    processes: dict[int, Entry] = field(default_factory=dict)
    columns: dict[str, list[int]] = field(default_factory=lambda: {"cpu0": [100] * 8, "cpu1": [100] * 8})
    run_ticks: int = 0
    next_pid: int = 1000

    def __post_init__(self) -> None:
        self.processes = {1: Entry(0, False, name="init"), LAUNCHER: Entry(1, True), 200: Entry(1, False, name="a) b(")}

    def burn(self, pid: int, ticks: int) -> None:
        self.processes[pid].own += ticks
        self.columns["cpu0"][0] += ticks
        self.run_ticks += ticks if self.processes[pid].is_run else 0

    def fork(self, parent: int) -> int:
        self.next_pid += 1
        self.processes[self.next_pid] = Entry(parent, self.processes[parent].is_run, started=self.next_pid)
        return self.next_pid

    def end(self, pid: int) -> None:
        """Its parent waits for it, and init takes its children."""
        ended = self.processes.pop(pid)
        self.processes[ended.parent].children += ended.own + ended.children
        for one in self.processes.values():
            if one.parent == pid:
                one.parent = 1

    def write(self) -> None:
        for path in list(self.root.iterdir()):
            if path.is_dir() and int(path.name) not in self.processes:
                for file in path.iterdir():
                    file.unlink()
                path.rmdir()
        lines = [f"{name} {' '.join(map(str, columns))} 0 0" for name, columns in self.columns.items()]
        (self.root / "stat").write_text("\n".join(["cpu  1 2 3", *lines, "intr 5", "ctxt 6"]) + "\n")
        for pid, one in self.processes.items():
            directory = self.root / str(pid)
            directory.mkdir(exist_ok=True)
            # As proc(5) numbers them: 3 state, 4 ppid, 9 flags, 14 to 17 times, 22 starttime.
            fields = ["S", one.parent, 1, 1, 0, -1, one.flags, 0, 0, 0, 0, one.own, 0, one.children, 0, 20, 0, 1, 0]
            text = " ".join(map(str, [*fields, one.started, 0, 0]))
            (directory / "stat").write_text(f"{pid} ({one.name}) {text}\n")
            (directory / "environ").write_text(one.environ)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def _reader(machine: Machine, *topologies: str) -> CpuReader:
    return CpuReader(topologies, root=LAUNCHER, proc=machine.root, cores={0, 1})


def _read(reader: CpuReader, machine: Machine) -> CpuReading:
    machine.write()
    found = reader.read()
    assert found is not None
    return found


def test_columns_are_of_the_cores_that_the_run_may_use(machine: Machine) -> None:
    machine.columns = {"cpu0": [10, 20, 30, 40, 50, 60, 70, 80], "cpu1": [0] * 8, "cpu2": [7] * 8}
    found = _read(_reader(machine), machine)
    assert (found.cores, found.total_s, found.idle_s, found.processes_s, found.stolen_s) == (
        2, 360 / TICKS, 90 / TICKS, 60 / TICKS, 80 / TICKS,
    )  # fmt: skip


@pytest.mark.parametrize("text", [None, "", "cpu 1 2 3\n", "cpu0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0\n", "cpu0 1\n"])
def test_a_kernel_that_does_not_count_is_not_known(machine: Machine, text: str | None) -> None:
    reader = _reader(machine)
    machine.write()
    if text is None:
        (machine.root / "stat").unlink()
    else:
        (machine.root / "stat").write_text(text)
    assert reader.read() is None


def test_descendants_are_the_runs_and_the_rest_is_told_by_what_it_used_since(machine: Machine) -> None:
    reader = _reader(machine)
    worker = machine.fork(LAUNCHER)
    engine = machine.fork(worker)
    machine.burn(engine, 500)
    machine.burn(200, 900)
    first = _read(reader, machine)
    machine.burn(engine, 50)
    machine.burn(200, 30)
    second = _read(reader, machine)
    assert second.run_s - first.run_s == pytest.approx(50 / TICKS)
    assert (first.others, second.others) == ((), (BusyProcess(200, "a) b(", 30 / TICKS),))
    assert second.scope == "run"


def test_a_process_that_lost_its_parent_stays_the_runs_and_so_does_what_it_used(machine: Machine) -> None:
    reader = _reader(machine)
    worker = machine.fork(LAUNCHER)
    engine = machine.fork(worker)
    first = _read(reader, machine)
    machine.burn(engine, 70)
    machine.end(worker)
    _read(reader, machine)
    machine.end(engine)
    machine.burn(LAUNCHER, 5)
    last = _read(reader, machine)
    assert last.run_s - first.run_s == pytest.approx(75 / TICKS)


def test_another_process_of_an_ended_ones_pid_is_not_the_runs(machine: Machine) -> None:
    reader = _reader(machine)
    child = machine.fork(LAUNCHER)
    first = _read(reader, machine)
    machine.end(child)
    machine.processes[child] = Entry(1, False, own=4000, started=99)
    assert _read(reader, machine).run_s == first.run_s


def test_the_kernels_own_threads_are_nobodys(machine: Machine) -> None:
    machine.processes[2] = Entry(0, False, flags=KERNEL, name="kthreadd")
    reader = _reader(machine)
    _read(reader, machine)
    machine.burn(2, 50)
    assert _read(reader, machine).others == ()


def test_a_marked_topology_is_the_runs_wherever_it_was_started(machine: Machine) -> None:
    reader = _reader(machine, "trtx-a")
    assert _read(reader, machine).scope == "unknown", "none of its processes is seen"
    machine.processes[300] = Entry(200, True, environ=f"A=1\0{TOPOLOGY_VARIABLE}=trtx-a\0", started=1)
    machine.processes[301] = Entry(200, False, environ=f"{TOPOLOGY_VARIABLE}=trtx-ab\0", started=1)
    first = _read(reader, machine)
    for pid in (300, 301):
        machine.burn(pid, 25)
    second = _read(reader, machine)
    assert (second.scope, second.run_s - first.run_s) == ("run", pytest.approx(25 / TICKS))
    assert [one.pid for one in second.others] == [301]


STEPS = st.lists(
    st.tuples(st.sampled_from(["burn", "fork", "end", "read"]), st.integers(0, 50), st.integers(1, 300)), max_size=40
)


@settings(max_examples=examples(60), deadline=None)
@given(STEPS)
def test_the_runs_time_is_what_its_processes_used_however_they_come_and_go(
    steps: list[tuple[str, int, int]],
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        machine = Machine(Path(directory))
        reader = _reader(machine)
        before = _read(reader, machine)
        offset = before.run_s - machine.run_ticks / TICKS
        for what, chosen, ticks in steps:
            pids = sorted(machine.processes.keys() - {1})
            pid = pids[chosen % len(pids)]
            if what == "burn":
                machine.burn(pid, ticks)
            elif what == "fork":
                machine.fork(pid)
                _read(reader, machine)  # one that comes and goes between two readings is its parent's
            elif what == "end" and pid not in (LAUNCHER, 200):
                _read(reader, machine)  # what it used until now; after its end it is its parent's, or nobody's
                machine.end(pid)
            now = _read(reader, machine)
            assert now.run_s == pytest.approx(machine.run_ticks / TICKS + offset)
            assert now.run_s >= before.run_s
            before = now


SPIN = "import sys\nprint(flush=True)\nwhile True: pass"


@contextmanager
def _spinning() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process.pid
        finally:
            process.kill()


def test_a_real_busy_process_is_another_runs_and_our_own() -> None:
    with _spinning() as pid:
        ours, another = CpuReader(), CpuReader(root=pid + 2**22)  # no such process
        firsts = ours.read(), another.read()
        deadline = time.monotonic() + 60
        while True:
            time.sleep(0.2)
            own, foreign = ours.read(), another.read()
            assert own and foreign and firsts[0] and firsts[1]
            if own.run_s - firsts[0].run_s > 0.3 and pid in [one.pid for one in foreign.others]:
                break
            assert time.monotonic() < deadline
    assert foreign.run_s == firsts[1].run_s == 0
    assert pid not in [one.pid for one in own.others]
