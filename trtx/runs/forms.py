"""Documents of a run directory other than cells and journal: their versions, and the forms in which they are read.

``trtx.experiment`` writes all of them except ``summary.json``. It defines the forms that only it reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from trtx.bench.documents import DocumentKind
from trtx.bench.judge.judgement import CheckResult, Verdict
from trtx.bench.judge.sample import Window
from trtx.bench.load import Load
from trtx.stats.intervals import Interval

# 2: the request and its provenance are in one file; before, the provenance was in env.json and less complete. 3:
# load.fixed_schedule and gate.window. 4: eval. The fields' records have the values for older runs
# (trtx/config/option_field.py). 9: left_out; before, engine_configs included fields that were not in force. 10:
# fields_sha256, so that a new field of a sweep needs no version.
LOCK = DocumentKind("run.lock.yaml", version=10, oldest=2, since="it says less of what was measured, in a file beside it")
# 2: hosts, their discovery and several frontends. An older plan has one machine and one frontend.
PLAN = DocumentKind("plan.json", version=2, oldest=1, since="")
# 2: each latency lists the percentiles with enough samples; version 1 listed those of the request count.
SUMMARY = DocumentKind("summary.json", version=2, oldest=2, since="")
CONDITIONS = DocumentKind("conditions.json", version=1, oldest=1, since="")
BASELINE = DocumentKind("baseline.json", version=1, oldest=1, since="")
VERDICT = DocumentKind("verdict.json", version=1, oldest=1, since="")
COMPARISON = DocumentKind("comparison.json", version=1, oldest=1, since="")


@dataclass(frozen=True, slots=True)
class RecordedGpu:
    """A GPU available to the run. None: NVML doesn't report the value."""

    uuid: str | None
    name: str
    memory_bytes: int
    max_sm_clock_mhz: int | None
    application_sm_clock_mhz: int | None  # application clock, if somebody set one
    power_limit_w: float | None


@dataclass(frozen=True, slots=True)
class Container:
    """What a process can find out about its container. None: unknown from inside."""

    kind: str  # docker, podman, kubernetes, …
    image: str | None
    nvidia_build: str | None  # product and build of the NVIDIA base image


@dataclass(frozen=True, slots=True)
class Deployment:
    """What an attached deployment, which trtx doesn't serve, publishes about itself. None: not published."""

    url: str
    model: str
    server: str | None  # name of the server software
    server_version: str | None
    engine: str | None
    versions: dict[str, str] | None  # by package, of the workers' software
    workers: dict[str, int] | None  # by role
    gpu_names: tuple[str, ...] | None  # over all workers
    gpu_count: int | None  # over all workers: published, or given with --gpu-count
    api_key_from: str | None  # environment variable with the API key of the requests; None: no key
    deterministic: bool | None = None  # all workers declare that answers don't depend on the batch

    @property
    def worker_count(self) -> int | None:
        return None if self.workers is None else sum(self.workers.values())


@dataclass(frozen=True, slots=True)
class Environment:
    """Machine and software on which a run was started. None: absent or unknown."""

    started_at: datetime
    command: str
    commit: str | None  # of trtx's checkout; None for an installed package
    commit_changes: str | None  # hash of the changes to tracked files; None: no changes
    trtx_sources: str  # hash of the code that measures and serves, committed or not
    python: str
    versions: dict[str, str]  # by package, of packages that affect metrics
    torch_cuda: str | None  # CUDA release that torch was built for
    platform: str
    os: str | None  # the distribution, inside a container if there is one
    container: Container | None  # None: no container detected
    cpu: str
    cpu_cores: int
    memory_bytes: int
    memory_limit_bytes: int | None  # limit of the control group
    load_average: float  # before the run started anything
    gpus: tuple[RecordedGpu, ...]
    sm_clocks_mhz: tuple[int | None, ...]  # per GPU, before the run started anything
    gpu_driver: str | None
    driver_cuda: str | None  # highest CUDA release that the driver supports
    deployment: Deployment | None = None  # for an attached run; the other fields describe the client's machine


@dataclass(frozen=True, slots=True)
class Files:
    """Identity of the files of a model, or of a tokenizer alone."""

    revision: str | None  # commit on the hub, for a snapshot in the hub's cache
    count: int
    total_bytes: int
    sampled_sha256: str  # see trtx.checkpoint.identity: large files by header, size and samples


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A given engine-config field that the engine ignores."""

    field: str
    value: Any
    source: str  # --set, --tp or a file
    typed: bool  # False: the field is from a config that trtx ships or wrote


@dataclass(frozen=True, slots=True)
class MeasuredMode:
    """What one mode measured. None: an attached run knows it only from the deployment, or not at all."""

    engine: str | None
    model: str  # the model name in requests
    files: Files  # of the model; for an attached run, of the tokenizer
    gpu_names: tuple[str, ...] | None  # one entry per GPU in use
    workers: dict[str, int] | None  # by role
    engine_configs: dict[str, dict[str, Any]] | None  # by role, resolved: the LLM's keyword arguments in force
    aiperf: dict[str, str]  # by cell: command line of the first trial; later trials differ in their seeds
    # by role: given fields that are not in force; None also for a run that did not separate them
    left_out: dict[str, tuple[LeftOut, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Provenance:
    """Everything besides the request on which a run's metrics depend."""

    environment: Environment
    measured: dict[str, MeasuredMode]  # by mode
    dataset_sha256: str | None = None  # of the input_file's content; None: no input_file, or an older run
    directory: str | None = None  # base of relative paths in the request; None: there are none, or an older run
    fields_sha256: str | None = None  # of the names of the request's fields; None: an older run


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
    prompts: str = ""  # description of the prompts, except their lengths
    image_batch_size: int = 0  # images per prompt


@dataclass(frozen=True, slots=True)
class AskedScoring:
    tasks: tuple[str, ...]
    limit: int | None
    num_fewshot: int | None
    endpoint_type: str
    concurrency: int


@dataclass(frozen=True, slots=True)
class AskedRun:
    """The part of ``run.lock.yaml`` that reports use."""

    topologies: tuple[str, ...]  # labels
    load: AskedLoad
    attach: Attached | None
    provenance: Provenance
    eval: AskedScoring | None = None  # None: no scoring requested, or a run before version 4


@dataclass(frozen=True, slots=True)
class AskedOf:
    """The provenance from the run manifest of any run."""

    provenance: Provenance


@dataclass(frozen=True, slots=True)
class AskedScores:
    """The scored topologies from the run manifest of any run with scores."""

    topologies: tuple[str, ...]  # labels


@dataclass(frozen=True, slots=True)
class AskedTopology:
    model: str | None


@dataclass(frozen=True, slots=True)
class AskedEvaluation:
    """The part of a ``trtx eval`` run's manifest that reports use."""

    tasks: tuple[str, ...]
    topologies: tuple[str, ...]  # labels
    num_fewshot: int | None
    concurrency: int
    attach: Attached | None
    topology: AskedTopology
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    role: Literal["frontend", "agg", "prefill", "decode", "encode"]
    gpu_indices: tuple[int, ...]
    argv: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedTopology:
    model: str
    engine: str
    gpu_names: tuple[str, ...]
    processes: tuple[PlannedProcess, ...]

    @property
    def is_deterministic(self) -> bool:
        """Whether a worker's command line has --deterministic; answers are then bitwise identical in any batch."""
        return any("--deterministic" in process.argv for process in self.processes)


@dataclass(frozen=True, slots=True)
class Planned:
    """The part of ``plan.json`` that reports use."""

    topologies: dict[str, PlannedTopology]  # by label


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two runs, or between a run and what it would be here. None: unknown or absent."""

    name: str  # dotted: machine.cpu, agg.engine_configs.agg.max_batch_size
    before: Any
    now: Any

    @property
    def group(self) -> str:
        return self.name.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.name} was {condition_text(self.before)} and is {condition_text(self.now)}"


def condition_text(value: Any) -> str:
    """The value of a condition, as text for users."""
    if value is None:
        return "not known"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return str(value)


@dataclass(frozen=True, slots=True)
class ComparedWith:
    """The baseline of a verdict."""

    name: str
    run: str  # name of the run in which it was measured
    saved_at: datetime
    differences: tuple[str, ...]  # differences in conditions, as sentences
    unchecked: tuple[str, ...]  # conditions that neither side knows
    records_unchecked: tuple[str, ...] = ()  # sides whose metrics were not checked against their records, as sentences


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """``verdict.json``: the verdict on a run, with all its judgements."""

    verdict: Verdict
    exit_code: int
    sentence: str | None  # why it did not pass
    baseline: ComparedWith | None  # None: no comparison
    judgements: tuple[CheckResult, ...]  # by cell
    window: Window = "whole"  # part of each trial that was judged; older runs always used the whole


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    """One metric of one cell on both sides. None: it can't be computed, or was not measured."""

    cell: str
    metric: str
    baseline: float | None  # over all trials, in the metric's unit
    candidate: float | None
    unit: str
    ratio: Interval | None  # candidate / baseline
    limit: float | None  # limit of the ratio, beyond which it regressed; None: not judged
    verdict: Verdict | None  # None: not judged
    reason: str | None  # reason for the verdict, or why there is no ratio
    doubts: tuple[str, ...]  # why the cell is SUSPECT on either side
    # Baseline and candidate per block of an A/B run; empty for two runs.
    rounds: tuple[tuple[float | None, float | None], ...]


@dataclass(frozen=True, slots=True)
class ComparedScore:
    """One task on both sides: its first metric over the same samples."""

    topology: str  # the candidate's topology
    against: str  # the baseline's topology
    task: str
    metric: str
    baseline: float | None  # None: not scored there
    candidate: float
    difference: Interval | None  # candidate − baseline
    limit: float | None  # maximum permitted drop; None: not judged
    verdict: Verdict | None  # None: not judged
    reason: str | None  # reason for the verdict, or why there is no difference


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of a run, baseline or topology with another one."""

    baseline: str
    candidate: str
    differences: tuple[Difference, ...]
    unchecked: tuple[str, ...]  # conditions that neither side knows
    metrics: tuple[ComparedMetric, ...]  # by cell; empty if a side measured no speed
    window: Window  # the part of each trial that is compared
    scores: tuple[ComparedScore, ...] = ()  # by topology; empty if a side has no scores
    notes: tuple[str, ...] = ()  # what only one side has
    records_unchecked: tuple[str, ...] = ()  # sides whose metrics were not checked against their records, as sentences


@dataclass(frozen=True, slots=True)
class MeasuredStart:
    """One measured start of a topology."""

    topology: str
    round: int  # from 1


@dataclass(frozen=True, slots=True)
class ComparedArms:
    """``comparison.json``: the topologies (variants) of an A/B run, each compared with the baseline topology."""

    starts: tuple[MeasuredStart, ...]  # in order
    comparisons: tuple[Comparison, ...]
