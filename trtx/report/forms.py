"""The documents of a run directory beside cells and journal: their versions, and what is read of each.

``trtx.experiment`` writes them all but ``summary.json``; what it alone reads of them, it says itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from trtx.bench.documents import Document
from trtx.bench.judgement import Judgement, Verdict
from trtx.bench.load import Load

# 2: what was asked and what it was asked of stand in one file; before, the latter was env.json and less of it.
LOCK = Document("run.lock.yaml", version=2, oldest=2, since="it says less of what was measured, in a file beside it")
PLAN = Document("plan.json", version=1, oldest=1, since="")
# 2: the percentiles that have enough samples stand beside each latency; in 1 they were those of the requests.
SUMMARY = Document("summary.json", version=2, oldest=2, since="")
CONDITIONS = Document("conditions.json", version=1, oldest=1, since="")
BASELINE = Document("baseline.json", version=1, oldest=1, since="")
VERDICT = Document("verdict.json", version=1, oldest=1, since="")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that the run could use. None: NVML does not say."""

    uuid: str | None
    name: str
    memory_bytes: int
    max_sm_clock_mhz: int | None
    application_sm_clock_mhz: int | None  # that computing is asked to run at, where somebody set one
    power_limit_w: float | None


@dataclass(frozen=True, slots=True)
class Container:
    """What a process can tell of the container it runs in. None: that is not told inside."""

    kind: str  # docker, podman, kubernetes, …
    image: str | None
    nvidia_build: str | None  # product and build of NVIDIA's image that it was made from


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
    """The machine and the software that a run was started on. None: it has none, or does not say."""

    started_at: datetime
    command: str
    commit: str | None  # of trtx's checkout; None where it is installed
    commit_changes: str | None  # a hash of what tracked files differ from it; None: they don't
    trtx_sources: str  # a hash that changes with the code that measures and serves, committed or not
    python: str
    versions: dict[str, str]  # by package, of those that a figure depends on
    torch_cuda: str | None  # CUDA release that torch was built for
    platform: str
    os: str | None  # the distribution, inside the container where there is one
    container: Container | None  # None: nothing tells of one
    cpu: str
    cpu_cores: int
    memory_bytes: int
    memory_limit_bytes: int | None  # of the control group
    load_average: float  # before anything of the run was started
    gpus: tuple[Gpu, ...]
    sm_clocks_mhz: tuple[int | None, ...]  # of each of them, before anything of the run was started
    gpu_driver: str | None
    driver_cuda: str | None  # highest CUDA release that the driver runs
    deployment: Deployment | None = None  # of an attached run: the rest is of the machine that made the load


@dataclass(frozen=True, slots=True)
class Files:
    """Which files a model, or a tokenizer alone, was read from."""

    revision: str | None  # the commit on the hub, of a snapshot in its cache
    count: int
    total_bytes: int
    sampled_sha256: str  # see trtx.checkpoint.identity: large files by header, size and samples


@dataclass(frozen=True, slots=True)
class Measured:
    """What one mode measured. None: an attached run knows it of the deployment alone, or not."""

    engine: str | None
    model: str  # the name that requests carry
    files: Files  # of the model; of an attached run, of the tokenizer
    gpu_names: tuple[str, ...] | None  # one entry a GPU in use
    workers: dict[str, int] | None  # by role
    engine_configs: dict[str, dict[str, Any]] | None  # by role, resolved: the LLM's keyword arguments
    aiperf: dict[str, str]  # by cell, the call of its first trial; those after have other seeds


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a run was asked of, beside what was asked: all that its figures depend on."""

    environment: Environment
    measured: dict[str, Measured]  # by mode


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
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class AskedOf:
    """What the lock of any run says of its circumstances."""

    provenance: Provenance


@dataclass(frozen=True, slots=True)
class AskedTopology:
    model: str | None


@dataclass(frozen=True, slots=True)
class AskedEvaluation:
    """What a report takes from the lock of a run of ``trtx eval``."""

    tasks: tuple[str, ...]
    topologies: tuple[str, ...]  # their labels
    num_fewshot: int | None
    concurrency: int
    attach: Attached | None
    topology: AskedTopology
    provenance: Provenance


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


@dataclass(frozen=True, slots=True)
class ComparedWith:
    """The baseline of a verdict."""

    name: str
    run: str  # that it was measured in
    saved_at: datetime
    differences: tuple[str, ...]  # in which conditions the run differs from it, as sentences
    unchecked: tuple[str, ...]  # conditions that neither side knows


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """``verdict.json``: what all judgements say of a run, and each of them."""

    verdict: Verdict
    exit_code: int
    sentence: str | None  # why it did not pass
    baseline: ComparedWith | None  # None: compared with none
    judgements: tuple[Judgement, ...]  # by cell
