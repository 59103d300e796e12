"""The conditions on which a run's metrics depend, as lines of the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from trtx.bench import Cell, ValueRange
from trtx.bench.journal import JournalEvent, RunResumed, SweepStarted, TopologyReady
from trtx.bench.metrics import input_sequence_lengths, output_sequence_lengths
from trtx.report.left_out import left_out_conditions
from trtx.report.scores import Scores
from trtx.runs.forms import (
    AskedLoad,
    AskedRun,
    AskedScoring,
    Container,
    Deployment,
    Environment,
    PlannedTopology,
    RecordedGpu,
)

T = TypeVar("T")
NOT_KNOWN = "not known"
_LIBRARIES = ("nvidia-", "cuda-")  # packages that are in the manifest but would fill the page


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition on which the metrics depend."""

    name: str
    value: str


def conditions_of(
    asked: AskedRun | None,
    plans: Mapping[str, PlannedTopology],
    journal: tuple[JournalEvent, ...],
    cells: tuple[Cell, ...],
    scores: Scores | None = None,
) -> tuple[Condition, ...]:
    """The known conditions in page order. ``plans``: by topology; empty for an attached run."""
    plan = next(iter(plans.values()), None)
    load, machine = asked and asked.load, asked and asked.provenance.environment
    of = "Client's " if asked and asked.attach else ""  # then the environment is that of the client, not of the server
    found = [
        ("Command", machine and machine.command),
        ("Model", plan.model if plan else swept_model(journal)),
        ("Tokenizer's files" if of else "Model's files", asked and _files(asked)),
        ("Engine", engine_text(plan, asked)),
        ("Deterministic", deterministic_text(plans)),
        *(left_out_conditions(asked.provenance) if asked else ()),
        ("GPUs", plan and (", ".join(with_counts(plan.gpu_names)) or "none")),
        *(_of_deployment(machine.deployment) if machine else ()),
        (f"{of}GPU limits", machine and "; ".join(dict.fromkeys(filter(None, map(_limits, machine.gpus))))),
        (f"{of}GPU driver", machine and machine.gpu_driver),
        (f"{of}CUDA", machine and _cuda(machine)),
        (f"{of}CPU", machine and f"{machine.cpu}, {machine.cpu_cores} cores"),
        (f"{of}Memory", machine and f"{machine.memory_bytes / 2**30:.0f} GiB"),
        (f"{of}Load average before", machine and machine.load_average),
        ("ISL / OSL", load and _lengths(load, cells)),
        ("Prompts", load and load.prompts),
        ("Requests", load and _each(f"{cell.request_count} at {cell.asked}" for cell in load.cells)),
        ("Warm-up", load and _each(f"{cell.warmup_request_count} at {cell.asked}" for cell in load.cells)),
        ("Trials", load and load.trials),
        ("Price of a GPU hour", _price(cells)),
        ("Seed", load and load.seed),
        ("Streaming", load and ("yes" if load.streaming else "no")),
        ("Scores", asked and asked.eval and scores and _scoring(asked.eval, scores)),
        ("Started", machine and machine.started_at.isoformat(timespec="seconds")),
        ("Resumed", _resumptions(journal)),
        ("Commit", machine and _commit(machine)),
        (f"{of}Versions", machine and _versions(machine.versions)),
        (f"{of}Python", machine and machine.python),
        (f"{of}Platform", machine and ", ".join(filter(None, (machine.platform, machine.os)))),
        (f"{of}Container", machine and machine.container and _container(machine.container)),
        (
            "Time to load",
            ", ".join(f"{one.topology} {one.load_seconds:.1f} s" for one in events_of(TopologyReady, journal)),
        ),
    ]
    return tuple(Condition(name, str(value)) for name, value in found if value not in (None, ""))


def _price(cells: Iterable[Cell]) -> str:
    return _each(f"{cell.gpu_hour_price:.10g}" for cell in cells if cell.gpu_hour_price is not None)


def _each(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))


def _files(asked: AskedRun) -> str:
    """The served model's or tokenizer's files by hash; listed once if all modes use the same."""
    return "; ".join(
        f"{files.count} of {files.total_bytes:,} bytes, sampled SHA-256 {files.sampled_sha256[:12]}"
        for files in dict.fromkeys(one.files for one in asked.provenance.measured.values())
    )


def _limits(gpu: RecordedGpu) -> str:
    clock = gpu.application_sm_clock_mhz or gpu.max_sm_clock_mhz
    parts = (clock and f"{clock} MHz", gpu.power_limit_w and f"{gpu.power_limit_w:.0f} W")
    return ", ".join(part for part in parts if part)


def _cuda(machine: Environment) -> str:
    parts = (
        machine.gpu_driver and machine.driver_cuda and f"driver's {machine.driver_cuda}",
        machine.torch_cuda and f"torch's {machine.torch_cuda}",
    )
    return ", ".join(part for part in parts if part)


def _container(container: Container) -> str:
    return ", ".join(filter(None, (container.kind, container.image, container.nvidia_build)))


def _commit(machine: Environment) -> str | None:
    changes = machine.commit_changes
    return f"{machine.commit} and changes {changes}" if machine.commit and changes else machine.commit


def _of_deployment(deployment: Deployment | None) -> list[tuple[str, str]]:
    """What an attached run knows about the deployment; unknown values are listed as such."""
    if deployment is None:
        return []
    workers, gpus = deployment.workers, deployment.gpu_names
    named = gpus and ", ".join(with_counts(gpus))
    return [
        ("Server", " ".join(part for part in (deployment.server, deployment.server_version) if part) or NOT_KNOWN),
        ("Server's engine", deployment.engine or NOT_KNOWN),
        ("Server's versions", _versions(deployment.versions) if deployment.versions else NOT_KNOWN),
        ("Server is deterministic", {None: NOT_KNOWN, True: "yes", False: "no"}[deployment.deterministic]),
        ("Server's workers", " + ".join(f"{workers[role]} {role}" for role in workers) if workers else NOT_KNOWN),
        ("Server's GPUs", named or _gpu_count(deployment.gpu_count)),
        ("API key", "asked for and sent" if deployment.api_key_from else "none asked for"),
    ]


def _gpu_count(count: int | None) -> str:
    return NOT_KNOWN if count is None else f"{count}, of a kind {NOT_KNOWN}" if count else "none"


def _versions(versions: Mapping[str, str]) -> str:
    shown = {name: version for name, version in versions.items() if not name.startswith(_LIBRARIES)}
    return ", ".join(f"{name} {version}" for name, version in shown.items())


def _lengths(load: AskedLoad, cells: tuple[Cell, ...]) -> str:
    """The requested lengths, each with the lengths that the server counted."""
    parts = []
    for isl, osl in dict.fromkeys((one.isl, one.osl) for one in load.cells):
        of_pair = [cell for cell in cells if (cell.load.isl, cell.load.osl) == (isl, osl)]
        before = _length(
            isl,
            load.isl_stddev,
            [cell.value(input_sequence_lengths) for cell in of_pair],
            images=load.image_batch_size > 0,
        )
        after = _length(osl, load.osl_stddev, [cell.value(output_sequence_lengths) for cell in of_pair])
        most = "" if load.ignore_eos or osl is None else "at most "
        parts.append(f"{before} / {most}{after} tokens{' a turn' if load.session_turns_mean > 1 else ''}")
    return "; ".join(parts)


def _length(asked: int | None, stddev: float, counted: list[ValueRange | None], *, images: bool = False) -> str:
    """A requested length; "exact" only if every answer in every cell was counted and has this length.

    With ``images``, the request is about text alone, while the counts include image tokens.
    """
    asked_text = "what the dataset" if asked is None else f"{asked} ± {stddev:g}" if stddev else str(asked)
    asked_text += " of text" if images else ""
    known = [found for found in counted if found is not None]
    if not known or len(known) < len(counted):
        return f"{asked_text} asked"
    over_all = ValueRange(min(found.min for found in known), max(found.max for found in known))
    if asked is not None and over_all == ValueRange(asked, asked) and not images:
        return f"{asked} exact"
    return f"{asked_text} asked ({counted_tokens(over_all)} counted{', of images too' if images else ''})"


def _scoring(asked: AskedScoring, scores: Scores) -> str:
    versions = dict.fromkeys(one.lm_eval for one in scores.scored)
    shots = "as each task says" if asked.num_fewshot is None else str(asked.num_fewshot)
    return (
        f"lm-eval {' and '.join(versions) or NOT_KNOWN}, prompts as {asked.endpoint_type}, "
        f"{'all' if asked.limit is None else f'the first {asked.limit}'} samples of a task, few-shot examples {shots}, "
        f"{asked.concurrency} requests in flight, after the cells of the topology"
    )


def _resumptions(journal: tuple[JournalEvent, ...]) -> str:
    """Times at which the run was resumed, with the cells measured then."""
    return "; ".join(
        f"{datetime.fromtimestamp(event.time, UTC).isoformat(timespec='seconds')} for "
        f"{', '.join(event.missing) or 'nothing'}"
        for event in events_of(RunResumed, journal)
    )


def counted_tokens(counted: ValueRange) -> str:
    """A single length, or the minimum and maximum."""
    least, most = f"{counted.min:,.0f}", f"{counted.max:,.0f}"
    return least if least == most else f"{least} to {most}"


def engine_text(plan: PlannedTopology | None, asked: AskedRun | None) -> str:
    """The engine that served; "" if unknown."""
    if plan is not None:
        return f"{plan.engine} engine"
    return f"attached to {asked.attach.url}" if asked and asked.attach else ""


def deterministic_text(plans: Mapping[str, PlannedTopology]) -> str:
    """``yes``, or the names of the deterministic topologies if others are not; "" if none is."""
    found = [label for label, plan in plans.items() if plan.is_deterministic]
    return "yes" if found and len(found) == len(plans) else ", ".join(found)


def swept_model(journal: tuple[JournalEvent, ...]) -> str | None:
    """The model name in the requests."""
    return next((event.model for event in events_of(SweepStarted, journal)), None)


def events_of(kind: type[T], journal: tuple[JournalEvent, ...]) -> tuple[T, ...]:
    """The events of one kind, in order."""
    return tuple(event for event in journal if isinstance(event, kind))


def with_counts(names: Sequence[str]) -> list[str]:
    """Each name once, with its number of occurrences."""
    return [f"{names.count(name)}× {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)]
