"""Descriptions of machines, which show every row of the doctor in each of its states, and a scripted kernel."""

from __future__ import annotations

import os
import re
import resource
import shutil
import sys
import tempfile
from collections import namedtuple
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from doctor_hosts import HOSTS

from trtx.cli.doctor import table
from trtx.doctor.check import Check
from trtx.doctor.facts import (
    Directory,
    Facts,
    GpuFacts,
    GpuPair,
    GpuProcess,
    Gpus,
    Package,
    Software,
    System,
    Topology,
)
from trtx.doctor.gather import system as gathering
from trtx.doctor.judge import judge

GIB = 2**30
H100 = GpuFacts(
    index=0,
    name="NVIDIA H100 80GB HBM3",
    memory_bytes=80 * GIB,
    free_bytes=79 * GIB,
    compute_capability=(9, 0),
    sm_clock_mhz=345,
    max_sm_clock_mhz=1980,
    clock_reasons=("idle",),
    power_limit_w=700,
    default_power_limit_w=700,
    uncorrected_ecc_errors=0,
    remap_pending=False,
    remap_failed=False,
    recovery="none",
    persistence=True,
    compute_mode="default",
    nvlinks_up=18,
    fabric_ready=True,
)
PACKAGES = {
    "trtx": Package(
        "0.1.0",
        (
            "torch<2.14,>=2.11",
            "ai-dynamo-runtime==1.6.1",
            'ai-dynamo==1.6.1; extra == "dynamo"',
            'tensorrt_llm>=1.2.1; extra == "tensorrt-llm"',
        ),
    ),
    "torch": Package("2.11.0+cu130"),
    "transformers": Package("5.17.0"),
    "ai-dynamo": Package(
        "1.6.1",
        ("ai-dynamo-runtime==1.6.1", "aisimulate==0.13.0", 'tensorrt-llm==1.3.0rc22; extra == "trtllm"'),
    ),
    "ai-dynamo-runtime": Package("1.6.1"),
    "aiperf": Package("0.13.0"),
    "nixl": Package("1.5.1", ("nixl-cu12==1.5.1", "nixl-cu13==1.5.1")),
    "nixl-cu12": Package("1.5.1"),
    "nixl-cu13": Package("1.5.1"),
}


def described_system(**facts: Any) -> System:
    lacking = sorted({field.name for field in fields(System)} - facts.keys())
    assert not lacking, (
        f"tests/unit/doctor/doctor_machines.py does not say what {', '.join(lacking)} of System is: add it to SYSTEM, "
        "a machine without problems, and to script_kernel, which also has to make the kernel answer with it"
    )
    return System(**facts)


SYSTEM = described_system(
    cpu_cores=16,
    load_average=0.2,
    memory_available_bytes=100 * GIB,
    memory_left_bytes=None,
    locked_bytes=None,
    open_files=65_536,
    open_files_hard=65_536,
    inotify_used=10,
    inotify_limit=128,
    shm_bytes=16 * GIB,
    port=8000,
    port_problem=None,
    ephemeral_first=32_768,
    directories=(
        Directory("run directories", Path("/data/runs"), 500 * GIB),
        Directory("checkpoint cache", Path("/data/cache"), 500 * GIB),
        Directory("discovery directory", Path("/tmp"), 50 * GIB),
    ),
)


def script_kernel(root: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    """Makes kernel and psutil answer each question with another number. Returns what gather_system has to report for
    port 0 and run directories below ``root``."""
    memory = SimpleNamespace(total=11 * GIB, available=7 * GIB, used=3 * GIB, free=GIB, percent=36.0)
    sizes = {"/dev/shm": (64 * 2**20, 2**20, 63 * 2**20)}
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 2.5, 3.5))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {6})
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1111, 2222) if what == resource.RLIMIT_NOFILE else (9, 9))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(*sizes.get(str(path), (900, 500, 400))))
    for number, descriptors in enumerate((("anon_inode:inotify", "socket:[1]"), ("anon_inode:inotify",) * 2)):
        (root / f"proc/{number}/fd").mkdir(parents=True)
        for descriptor, target in enumerate(descriptors):
            (root / f"proc/{number}/fd/{descriptor}").symlink_to(target)
    (root / "instances").write_text("128\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/memory.max").write_text(f"{8 * GIB}\n")
    (root / "sys/fs/cgroup/memory.current").write_text(f"{3 * GIB}\n")
    (root / "range").write_text("32768\t60999\n")
    for name, path in (
        ("_ROOT", "."),
        ("_PROCESSES", "proc"),
        ("_INOTIFY_LIMIT", "instances"),
        ("_EPHEMERAL", "range"),
    ):
        monkeypatch.setattr(gathering, name, root / path)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(root / "proc"))
    monkeypatch.setenv("TRTX_CACHE", str(root))
    return described_system(
        cpu_cores=1, load_average=1.5, memory_available_bytes=7 * GIB, memory_left_bytes=5 * GIB,
        locked_bytes=9, open_files=1111, open_files_hard=2222,
        inotify_used=3, inotify_limit=128, shm_bytes=64 * 2**20, port=0, port_problem=None, ephemeral_first=32768,
        directories=(
            Directory("run directories", root, 400),
            Directory("checkpoint cache", root, 400),
            Directory("discovery directory", root / "proc", 400),
        ),
    )  # fmt: skip


LAPTOP_GPUS = Gpus(problem="NVML Shared Library Not Found")


def h100_box(count: int = 1, *, nvlink: bool = True, **changes: Any) -> Facts:
    """A machine on which nothing is amiss, with ``changes`` to the first GPU."""
    visible = tuple(replace(H100, index=index) for index in range(count))
    pairs = tuple(
        GpuPair(first, second, nvlink=nvlink, peer_access=True, path="SYS")
        for first in range(count)
        for second in range(first + 1, count)
    )
    gpus = Gpus(
        driver="580.95.05",
        cuda=(13, 0),
        installed=count,
        visible=(replace(visible[0], **changes), *visible[1:]),
        pairs=pairs,
    )
    return Facts("auto", "torch", Software("3.12.3", ">=3.11,<3.13", PACKAGES, torch_cuda="13.0"), gpus, SYSTEM)


def laptop() -> Facts:
    cpu = {**PACKAGES, "torch": Package("2.13.0+cpu")}
    return Facts("auto", "torch", Software("3.11.13", ">=3.11,<3.13", cpu), LAPTOP_GPUS, SYSTEM)


def with_packages(facts: Facts, **versions: str | Package | None) -> Facts:
    """Other packages; None removes one. Underscores stand for hyphens."""
    packages = dict(facts.software.packages)
    for name, value in versions.items():
        key = name.replace("_", "-")
        packages.pop(key, None)
        if value is not None:
            packages[key] = value if isinstance(value, Package) else Package(value)
    return replace(facts, software=replace(facts.software, packages=packages))


def with_system(**changes: Any) -> Facts:
    return replace(h100_box(), system=replace(SYSTEM, **changes))


def _amiss() -> Facts:
    """Two GPUs, packages, limits and leftovers: whatever can be wrong at once."""
    facts = h100_box(
        2,
        clock_reasons=("power limit", "thermal, by hardware"),
        power_limit_w=350.0,
        recovery="a reset of the GPU",
        remap_pending=True,
        uncorrected_ecc_errors=3,
        persistence=False,
        mig="on",
        compute_mode="exclusive process",
        compute_capability=(7, 5),
        fabric_ready=False,
        nvlinks_up=6,
        processes=(GpuProcess(4_194_303, "python3.12", 79 * GIB), GpuProcess(4_194_304, None, None)),
        free_bytes=1 * GIB,
    )
    extras = (
        'nvidia-modelopt<0.48,>=0.47; extra == "quantize"',
        'av<19,>=18; extra == "video"',
        'nvidia-cudnn-frontend<2,>=1.32; extra == "cudnn"',
    )
    trtx = Package("0.1.0", (*PACKAGES["trtx"].requires, *extras))
    engine = Package("1.2.1", ("torch==2.9.1", "numpy<2.4", "mpi4py>=4"))
    facts = with_packages(
        facts,
        trtx=trtx,
        tensorrt_llm=engine,
        numpy="2.5.0",
        mpi4py="3.1.5",
        nvidia_modelopt="0.46.0",
        nvidia_cudnn_frontend="1.12.0",
        nixl_cu13=None,
        av="17.0.0",
    )
    system = replace(
        SYSTEM,
        cpu_cores=2,
        memory_available_bytes=2 * GIB,
        ephemeral_first=1024,
        open_files=256,
        open_files_hard=256,
        inotify_used=126,
        shm_bytes=64 * 2**20,
        port_problem="port 8000 on 127.0.0.1 is in use by python3.12 (pid 4194303); choose another with --port",
        directories=(
            Directory("run directories", Path("/data/runs"), GIB),
            Directory("checkpoint cache", Path("/data/cache"), GIB, "Read-only file system"),
            Directory("discovery directory", Path("/tmp"), 0, "No space left on device"),
        ),
    )
    topologies = (
        Topology("trtx-aaaaaaaa", (11, 12), is_guarded=True, scratch=Path("/tmp/trtx-aaaaaaaa")),
        Topology("trtx-bbbbbbbb", tuple(range(4_194_000, 4_194_020)), is_guarded=False),
        Topology("trtx-cccccccc", (), is_guarded=False, scratch=Path("/tmp/trtx-cccccccc")),
    )
    return replace(
        facts,
        engine_asked="tensorrt-llm",
        engine="tensorrt-llm",
        software=replace(facts.software, python="3.13.1", open_mpi="5.0.7"),
        system=system,
        topologies=topologies,
        environment={"NCCL_P2P_DISABLE": "1", "OMPI_COMM_WORLD_SIZE": "8"},
    )


def _short_of_everything() -> Facts:
    """What is a warning where all is amiss fails here, and the other way round."""
    facts = h100_box(
        compute_mode="prohibited", remap_failed=True, processes=(GpuProcess(4711, "python", GIB),), free_bytes=70 * GIB
    )
    system = replace(
        SYSTEM,
        load_average=12.0,
        memory_available_bytes=GIB // 2,
        open_files=128,
        inotify_used=122,
        shm_bytes=64 * 2**20,
        directories=(Directory("run directories", Path("/data/runs"), 2**20),),
    )
    return replace(facts, system=system, environment={"SLURM_JOB_ID": "1", "PMI_RANK": "0"})


def with_tensorrt_llm(facts: Facts, version: str, *, open_mpi: str | None = "4.1.6") -> Facts:
    """The same machine, set up to serve with TensorRT-LLM."""
    facts = with_packages(facts, tensorrt_llm=version, mpi4py="4.0.1", nvidia_modelopt="0.47.0")
    return replace(facts, engine="tensorrt-llm", software=replace(facts.software, open_mpi=open_mpi))


def _with_gpus(facts: Facts, **changes: Any) -> Facts:
    return replace(facts, gpus=replace(facts.gpus, **changes))


_NO_CUDA = with_packages(h100_box(), torch="2.13.0+cpu", nixl=Package("1.5.1"), nixl_cu12=None, nixl_cu13=None)
_NO_DRIVER = replace(laptop(), gpus=Gpus(problem="Driver Not Loaded", installed=2))
_HIDDEN = replace(
    laptop(), gpus=Gpus(driver="580.95.05", installed=8), environment={"CUDA_VISIBLE_DEVICES": ""}
)  # by the caller
_VIDEOS = with_packages(h100_box(), av="18.1.0")
MACHINES = {
    "one H100": h100_box(),
    "one whose engines can share memory": with_packages(h100_box(), cuda_bindings="13.2.0"),
    "one with cuDNN's frontend": with_packages(h100_box(), nvidia_cudnn_frontend="1.32.0"),
    "one that decodes videos": _VIDEOS,
    "one that decodes videos, with PyAV's wheel": replace(
        _VIDEOS, software=replace(_VIDEOS.software, gpl_codecs=("x264", "x265"))
    ),
    "eight H100": h100_box(8),
    "two GPUs on PCIe": h100_box(2, nvlink=False),
    "laptop": laptop(),
    "everything amiss": _amiss(),
    "everything short": _short_of_everything(),
    "no driver": _NO_DRIVER,
    "no driver for tensorrt-llm": replace(_NO_DRIVER, engine="tensorrt-llm"),
    "old driver": _with_gpus(h100_box(), driver="570.86.15", cuda=(12, 8)),
    "driver that does not say its CUDA": _with_gpus(h100_box(), cuda=None),
    "hidden GPUs": _HIDDEN,
    "hidden GPUs for tensorrt-llm": replace(_HIDDEN, engine="tensorrt-llm"),
    "torch without CUDA": replace(_NO_CUDA, software=replace(_NO_CUDA.software, torch_cuda=None)),
    "trtx from its sources": with_packages(h100_box(), trtx=None, aiperf=None, nixl=None),
    "nixl of two versions": with_packages(h100_box(), nixl=Package("1.5.1"), nixl_cu12="1.4.0"),
    "nixl of another CUDA": with_packages(h100_box(), nixl=Package("1.5.1"), nixl_cu13=None),
    "tensorrt-llm without a GPU": replace(laptop(), engine_asked="tensorrt-llm", engine="tensorrt-llm"),
    "tensorrt-llm": with_tensorrt_llm(h100_box(), "1.3.0rc22"),
    "tensorrt-llm of another Dynamo": with_tensorrt_llm(h100_box(), "1.2.1", open_mpi=None),
    "tensorrt-llm out of range": with_tensorrt_llm(h100_box(), "1.1.0"),
    "stand-in of tensorrt-llm": with_tensorrt_llm(laptop(), "1.3.0rc22+cpu"),
    "docker's shared memory": with_system(open_files=sys.maxsize, shm_bytes=64 * 2**20),
    **{name: replace(h100_box(), hosts=facts) for name, facts in HOSTS.items()},
}
"""A new row, or a new status of one, is shown on one of them, or on one more."""


def rows(facts: Facts) -> dict[str, Check]:
    """The rows by name. Fails if a row breaks a rule for all rows."""
    checks = judge(facts)
    names = [check.name for check in checks]
    twice = sorted({name for name in names if names.count(name) > 1})
    assert not twice, f"trtx/doctor/judge makes two rows of the name {', '.join(twice)}: rename one"
    for check in checks:
        assert check.seen, f"the row {check.name!r} has no text under seen: add it in trtx/doctor/judge"
        if check.status in ("warning", "failed"):
            assert check.expected and check.fix, (
                f"the row {check.name!r} is {check.status} without what is expected or a fix: add both in "
                "trtx/doctor/judge"
            )
    assert_fits(checks)
    return {check.name: check for check in checks}


def assert_fits(checks: tuple[Check, ...]) -> None:
    for line in (re.sub("\x1b\\[[0-9;]*m", "", line) for line in table(checks, 80)):
        assert len(line) <= 80, (
            f"this row of trtx/doctor/judge is wider than 80 columns; shorten its words to 49 characters:\n{line}"
        )
