"""The documents of a run directory beside cells and journal: their versions, and what is read of each.

``trtx.experiment`` writes them all but ``summary.json``; what it alone reads of them, it says itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from trtx.bench.documents import Document
from trtx.stats.intervals import Interval
from trtx.bench.judge.judgement import Judgement, Verdict
from trtx.bench.load import Load
from trtx.bench.judge.sample import Window

# 2: what was asked and what it was asked of stand in one file; before, the latter was env.json and less of it.
# 3: load.fixed_schedule and gate.window; 4: eval. trtx.experiment.directory says what a run did before them.
# 9: left_out of what was measured; before, such fields stood in engine_configs as if they had been in force.
LOCK = Document("run.lock.yaml", version=9, oldest=2, since="it says less of what was measured, in a file beside it")
# 2: hosts, their discovery and several frontends; a plan before them is of one machine and one frontend.
PLAN = Document("plan.json", version=2, oldest=1, since="")
# 2: the percentiles that have enough samples stand beside each latency; in 1 they were those of the requests.
SUMMARY = Document("summary.json", version=2, oldest=2, since="")
CONDITIONS = Document("conditions.json", version=1, oldest=1, since="")
BASELINE = Document("baseline.json", version=1, oldest=1, since="")
VERDICT = Document("verdict.json", version=1, oldest=1, since="")
COMPARISON = Document("comparison.json", version=1, oldest=1, since="")


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
    deterministic: bool | None = None  # every worker of it says that its answers are the same in any batch

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
class LeftOut:
    """A field of an engine config that was given and on which the engine does not act."""

    field: str
    value: Any
    source: str  # --set, --tp or a file
    typed: bool  # False: it is of a config that trtx ships or wrote


@dataclass(frozen=True, slots=True)
class Measured:
    """What one mode measured. None: an attached run knows it of the deployment alone, or not."""

    engine: str | None
    model: str  # the name that requests carry
    files: Files  # of the model; of an attached run, of the tokenizer
    gpu_names: tuple[str, ...] | None  # one entry a GPU in use
    workers: dict[str, int] | None  # by role
    engine_configs: dict[str, dict[str, Any]] | None  # by role, resolved: the LLM's keyword arguments, as in force
    aiperf: dict[str, str]  # by cell, the call of its first trial; those after have other seeds
    # by role, what was given beside them and is not in force; None too of a run that did not tell them apart
    left_out: dict[str, tuple[LeftOut, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a run was asked of, beside what was asked: all that its figures depend on."""

    environment: Environment
    measured: dict[str, Measured]  # by mode
    dataset_sha256: str | None = None  # of what an input_file held; None: there was none, or an older run did not say
    directory: str | None = None  # where relative paths of what was asked begin; None: there are none, or an older run


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
    image_batch_size: int = 0  # images beside each prompt's text


@dataclass(frozen=True, slots=True)
class AskedScoring:
    tasks: tuple[str, ...]
    limit: int | None
    num_fewshot: int | None
    endpoint_type: str
    concurrency: int


@dataclass(frozen=True, slots=True)
class AskedRun:
    """What a report takes from ``run.lock.yaml``."""

    topologies: tuple[str, ...]  # their labels
    load: AskedLoad
    attach: Attached | None
    provenance: Provenance
    eval: AskedScoring | None = None  # None: nothing was to be scored, as before version 4


@dataclass(frozen=True, slots=True)
class AskedOf:
    """What the lock of any run says of its circumstances."""

    provenance: Provenance


@dataclass(frozen=True, slots=True)
class AskedScores:
    """What the lock of any run says of whom it scored, if it did."""

    topologies: tuple[str, ...]  # their labels


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
    argv: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedTopology:
    model: str
    engine: str
    gpu_names: tuple[str, ...]
    processes: tuple[PlannedProcess, ...]

    @property
    def is_deterministic(self) -> bool:
        """Its workers are told so on their command lines; answers are then the same to the bit in any batch."""
        return any("--deterministic" in process.argv for process in self.processes)


@dataclass(frozen=True, slots=True)
class Planned:
    """What a report takes from ``plan.json``."""

    topologies: dict[str, PlannedTopology]  # by label


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two runs differ, or a run and what it would be here. None: not known, or there is none."""

    name: str  # dotted: machine.cpu, agg.engine_configs.agg.max_batch_size
    before: Any
    now: Any

    @property
    def group(self) -> str:
        return self.name.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.name} was {told(self.before)} and is {told(self.now)}"


def told(value: Any) -> str:
    """A value of a condition, for people."""
    if value is None:
        return "not known"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return str(value)


@dataclass(frozen=True, slots=True)
class ComparedWith:
    """The baseline of a verdict."""

    name: str
    run: str  # that it was measured in
    saved_at: datetime
    differences: tuple[str, ...]  # in which conditions the run differs from it, as sentences
    unchecked: tuple[str, ...]  # conditions that neither side knows
    records_unchecked: tuple[str, ...] = ()  # whose figures nobody checked to be of their records, as sentences


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """``verdict.json``: what all judgements say of a run, and each of them."""

    verdict: Verdict
    exit_code: int
    sentence: str | None  # why it did not pass
    baseline: ComparedWith | None  # None: compared with none
    judgements: tuple[Judgement, ...]  # by cell
    window: Window = "whole"  # of each trial, what figures were judged of; before there was a choice, the whole


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    """One metric of one cell on both sides. None: it can't be computed, or was not measured."""

    cell: str
    metric: str
    baseline: float | None  # over all trials, in the metric's unit
    candidate: float | None
    unit: str
    ratio: Interval | None  # candidate / baseline
    limit: float | None  # of the ratio, beyond which it regressed; None: nothing was judged
    verdict: Verdict | None  # None: nothing was judged
    reason: str | None  # of the verdict, or why there is no ratio
    doubts: tuple[str, ...]  # why the cell, on either side, is SUSPECT
    rounds: tuple[tuple[float | None, float | None], ...]  # baseline and candidate in each; none of two runs' trials


@dataclass(frozen=True, slots=True)
class ComparedScore:
    """One task on both sides, by its first metric, over the same samples."""

    topology: str  # of the candidate
    against: str  # topology of the baseline
    task: str
    metric: str
    baseline: float | None  # None: it was not scored there
    candidate: float
    difference: Interval | None  # candidate − baseline
    limit: float | None  # the most by which it may be worse; None: nothing was judged
    verdict: Verdict | None  # None: nothing was judged
    reason: str | None  # of the verdict, or why there is no difference


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of a run, a baseline or a topology with another one."""

    baseline: str
    candidate: str
    differences: tuple[Difference, ...]
    unchecked: tuple[str, ...]  # conditions that neither side knows
    metrics: tuple[ComparedMetric, ...]  # by cell; none where a side measured no speed
    window: Window  # of each trial, on both sides
    scores: tuple[ComparedScore, ...] = ()  # by topology; none where a side has none
    notes: tuple[str, ...] = ()  # what only one side has
    records_unchecked: tuple[str, ...] = ()  # whose figures nobody checked to be of their records, as sentences


@dataclass(frozen=True, slots=True)
class MeasuredStart:
    """A start of a topology that was measured."""

    topology: str
    round: int  # from 1


@dataclass(frozen=True, slots=True)
class ComparedArms:
    """``comparison.json``: the topologies of an A/B run, each against the one that is their baseline."""

    starts: tuple[MeasuredStart, ...]  # in their order
    comparisons: tuple[Comparison, ...]
