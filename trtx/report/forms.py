"""The documents of a run directory beside cells and journal: their versions, and what is read of each.

``trtx.experiment`` writes them all but ``summary.json``; what it alone reads of them, it says itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from trtx.bench.documents import Document
from trtx.bench.load import Load

LOCK = Document("run.lock.yaml", version=1, oldest=1, since="")
PLAN = Document("plan.json", version=1, oldest=1, since="")
ENVIRONMENT = Document("env.json", version=1, oldest=1, since="")
# 2: the percentiles that have enough samples stand beside each latency; in 1 they were those of the requests.
SUMMARY = Document("summary.json", version=2, oldest=2, since="")


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Deployment:
    """What a deployment that something else serves told of itself. None: it publishes no such thing."""

    url: str
    model: str
    server: str | None  # whose software answers
    server_version: str | None
    engine: str | None
    versions: dict[str, str] | None  # by package, of what its workers run on
    workers: dict[str, int] | None  # by role
    gpu_names: tuple[str, ...] | None  # of all workers
    gpu_count: int | None  # of all workers: published, or said with --gpu-count
    api_key_from: str | None  # the variable whose value each request carried; None: it asks for no key

    @property
    def worker_count(self) -> int | None:
        return None if self.workers is None else sum(self.workers.values())


@dataclass(frozen=True, slots=True)
class Environment:
    """``env.json``: what a reader needs to judge the figures and make them again."""

    started_at: datetime
    command: str
    commit: str | None  # of trtx's checkout, "+changes" when tracked files differ from it; None where it is installed
    trtx_sources: str  # changes with the code that measures and serves
    python: str
    versions: dict[str, str]  # by package
    platform: str
    cpu: str
    cpu_cores: int
    memory_bytes: int
    load_average: float  # before anything of the run was started
    gpus: tuple[Gpu, ...]
    gpu_driver: str | None
    deployment: Deployment | None = None  # of an attached run: the rest is of the machine that made the load


@dataclass(frozen=True, slots=True)
class Attached:
    url: str
    model: str | None


@dataclass(frozen=True, slots=True)
class AskedLoad:
    isl_stddev: float
    osl_stddev: float
    trials: int
    seed: int
    streaming: bool
    ignore_eos: bool
    cells: tuple[Load, ...]
    session_turns_mean: int = 1
    prompts: str = ""  # what is said of them beside their lengths


@dataclass(frozen=True, slots=True)
class AskedRun:
    """What a report takes from ``run.lock.yaml``."""

    topologies: tuple[str, ...]  # their labels
    load: AskedLoad
    attach: Attached | None


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    role: Literal["frontend", "agg", "prefill", "decode", "encode"]
    gpu_indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlannedTopology:
    model: str
    engine: str
    gpu_names: tuple[str, ...]
    processes: tuple[PlannedProcess, ...]


@dataclass(frozen=True, slots=True)
class Planned:
    """What a report takes from ``plan.json``."""

    topologies: dict[str, PlannedTopology]  # by label
