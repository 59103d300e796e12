"""What a run was measured under, as far as others may differ in it: what comparisons go by.

Kept in a run's ``conditions.json`` from before anything starts, and in every baseline. A condition is named by its
group and key, ``machine.cpu``. What nobody knows is None, and differs from whatever is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from trtx.bench import Cell, Load, LoadSpec
from trtx.config.wording import quoted
from trtx.errors import UsageError
from trtx.experiment.bench.spec import ExperimentSpec
from trtx.experiment.left_out import left_out_of
from trtx.experiment.scoring_spec import ScoringSpec
from trtx.runs.forms import Deployment, Difference, Environment, LeftOut, Measured, Provenance
from trtx.topology import Plan

_ROUTER = "--router-mode"
_DETERMINISTIC = "--deterministic"
# Figures of two runs that differ in one of these say nothing of what was changed between them. The other groups are
# what is changed: topologies, configs, versions.
COMPARED_BY = ("model", "load", "machine")
_ALWAYS = ("model.name", "model.weights", "machine.gpus", "machine.cpu", "machine.cpu_cores")
_JUDGED_BY = {"min_score", "max_drop"}
_AXES = {"trials", "cells"}  # of a load, beside what each cell's own load has


@dataclass(frozen=True, slots=True)
class Conditions:
    """Of one run, by group. Values are plain."""

    model: dict[str, Any]  # of all topologies, or by topology where they serve several
    load: dict[str, Any]  # what all cells have in common; each has its own load beside it
    machine: dict[str, Any]
    topology: dict[str, Any]
    versions: dict[str, Any]
    eval: dict[str, Any] = field(default_factory=dict)  # what was asked to be scored; nothing where none was, or before


def conditions_of(spec: ExperimentSpec, plans: Mapping[str, Plan], provenance: Provenance) -> Conditions:
    """Of a run that is about to start. ``plans``: by topology; none of an attached run."""
    environment, load = provenance.environment, spec.load.model_dump(mode="json")
    load["input_file"] = provenance.dataset_sha256  # where it lies changes nothing
    own = {one.name for one in fields(Load)} | _AXES
    machine, topology = _served(plans, environment) if plans else _attached(environment.deployment)
    return Conditions(
        model=_model(provenance),
        load={name: load[name] for name in LoadSpec.model_fields if name not in own},
        machine={**machine, "cpu": environment.cpu, "cpu_cores": environment.cpu_cores},
        topology=topology,
        versions=_versions(environment),
        eval={} if spec.eval is None else _asked(spec.eval),
    )


def conditions_of_scores(asked: ScoringSpec, plans: Mapping[str, Plan], provenance: Provenance) -> Conditions:
    """Of a run that measured no speed, from what lies in its directory. It has no load."""
    environment = provenance.environment
    topology = {
        label: {
            "engine": measured.engine,
            "workers": measured.workers,
            **(_sharing(plans[label]) if label in plans else {}),
            "gpus": None if measured.gpu_names is None else list(measured.gpu_names),
            "router": _router(plans[label]) if label in plans else None,
            "deterministic": _is_deterministic(plans[label]) if label in plans else None,
            "engine_configs": measured.engine_configs,
            "left_out": _values(measured.left_out or {}),
        }
        for label, measured in provenance.measured.items()
    }
    machine: dict[str, Any] = {"gpus": sorted({gpu.name for gpu in environment.gpus})}
    if environment.deployment is not None:
        machine, topology = _attached(environment.deployment)
    return Conditions(
        model=_model(provenance),
        load={},
        machine={**machine, "cpu": environment.cpu, "cpu_cores": environment.cpu_cores},
        topology=topology,
        versions=_versions(environment),
        eval=_asked(asked),
    )


def _asked(scoring: ScoringSpec) -> dict[str, Any]:
    """All that decides what is asked of whom, and in what company; by what it is judged afterwards decides nothing."""
    asked = scoring.model_dump(mode="json", include=set(ScoringSpec.model_fields) - _JUDGED_BY)
    return {name: _UNASKED.get(name, "none") if value is None else value for name, value in asked.items()}


# What is asked where nobody said: it is known.
_UNASKED = {"limit": "all", "num_fewshot": "as each task says", "needle_lengths": "by the context"}


def differences(before: Conditions, now: Conditions) -> tuple[Difference, ...]:
    """In what two runs differ, those that make figures incomparable first. Of a run that has no load, or asked for no
    score, nobody expects one."""
    sides = [asdict(before), asdict(now)]
    for group in ("load", "eval"):
        if not all(side[group] for side in sides):
            sides = [{**side, group: {}} for side in sides]
    alone = tuple(_of_one_side(*sides))
    found = (*differing(*map(_flat, sides)), *alone)
    return tuple(sorted(found, key=lambda one: (one.group not in COMPARED_BY, one.group != "topology")))


def _of_one_side(before: dict[str, Any], now: dict[str, Any]) -> Iterator[Difference]:
    """A topology that one run alone served, once and not key by key; it is taken out of ``before`` or ``now``. What
    serves an attached run has no label."""
    served = [side["topology"] for side in (before, now)]
    if not all(served) or any("server" in one for one in served):
        return
    every = {**served[0], **served[1]}
    labels = [one for one in every if isinstance(every[one], Mapping) and not all(one in side for side in served)]
    for label in labels:
        yield Difference(f"topology.{label}", *("served" if label in one else "not served" for one in served))
    for side in (before, now):
        side["topology"] = {label: held for label, held in side["topology"].items() if label not in labels}


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    """What is not the same, by name: in the order of before, what came since at the end."""
    for name in dict.fromkeys((*before, *now)):
        if before.get(name) != now.get(name):
            yield Difference(name, before.get(name), now.get(name))


def unchecked(before: Conditions, now: Conditions) -> tuple[str, ...]:
    """The conditions that comparisons go by and that neither run knows."""
    both = [_flat(asdict(one)) for one in (before, now)]
    return tuple(name for name in _ALWAYS if not any(_knows(flat, name) for flat in both))


def _knows(flat: Mapping[str, Any], name: str) -> bool:
    """``model.name`` too where each topology has a model of its own, ``model.fp8.name``."""
    group, _, key = name.partition(".")
    return any(value is not None for at, value in flat.items() if at.startswith(f"{group}.") and at.endswith(f".{key}"))


def load_differences(cells: Iterable[Cell], loads: Mapping[str, Load]) -> tuple[Difference, ...]:
    """In what the loads of cells of one name differ, each once."""
    found: dict[str, Difference] = {}
    for cell in cells:
        if cell.name in loads:
            before, now = asdict(cell.load), asdict(loads[cell.name])
            for key in before:
                if before[key] != now[key]:
                    found.setdefault(f"load.{key}", Difference(f"load.{key}", before[key], now[key]))
    return tuple(found.values())


def refuse_others(source: str, found: Sequence[Difference], allowed: Sequence[str]) -> None:
    """Raises UsageError for a difference by which two runs can't be compared, unless it is ``allowed`` by its name or
    its group; and for an allowed one that is no condition."""
    named = {one.name for one in found}
    of_load = {*LoadSpec.model_fields, *(one.name for one in fields(Load))} - _AXES
    known = {*named, *COMPARED_BY, *_ALWAYS, *(f"load.{name}" for name in of_load)}
    for key in allowed:
        if key not in known:
            near = get_close_matches(key, known, n=3, cutoff=0.5)
            expected = f"did you mean {' or '.join(near)}" if near else f"expected one of {', '.join(sorted(known))}"
            raise UsageError(
                f"--allow-different {quoted(key)} is no condition that baselines are compared by; {expected}"
            )
    refused = [
        one for one in found if one.group in COMPARED_BY and one.name not in allowed and one.group not in allowed
    ]
    if refused:
        ways = " ".join(f"--allow-different {one.name}" for one in refused)
        raise UsageError(
            f"{source} is of other conditions: {'; '.join(map(str, refused))}; expected the same, or compare all the "
            f"same with {ways}"
        )


def _versions(environment: Environment) -> dict[str, Any]:
    return {
        **environment.versions,
        "python": environment.python,
        "gpu_driver": environment.gpu_driver,
        "trtx_sources": environment.trtx_sources,
    }


def _model(provenance: Provenance) -> dict[str, Any]:
    if provenance.environment.deployment is not None:  # the files here are those of a tokenizer
        return {"name": provenance.environment.deployment.model, "weights": None}
    models = {label: model_of(measured) for label, measured in provenance.measured.items()}
    first, *others = models.values()
    return first if all(model == first for model in others) else models


def model_of(measured: Measured) -> dict[str, Any]:
    """Of one topology that was served here."""
    return {"name": measured.model, "weights": measured.files.sampled_sha256[:16]}


def _served(plans: Mapping[str, Plan], environment: Environment) -> tuple[dict[str, Any], dict[str, Any]]:
    # Kinds of GPU alone: how many are there and not used changes nothing; how many are used is the topology's.
    machine = {"gpus": sorted({gpu.name for gpu in environment.gpus})}
    topology = {
        label: {
            "engine": plan.engine,
            "workers": plan.expected_workers(),
            **_sharing(plan),
            "gpus": list(plan.gpu_names),
            "router": _router(plan),
            "deterministic": _is_deterministic(plan),
            "engine_configs": plan.engine_configs,
            "left_out": _values(left_out_of(plan)),
        }
        for label, plan in plans.items()
    }
    return machine, topology


def _values(left_out: Mapping[str, Iterable[LeftOut]]) -> dict[str, dict[str, Any]]:
    """By role and field: what of the engine configs is not in force, so that no reader takes it for a cause."""
    return {role: {one.field: one.value for one in fields} for role, fields in left_out.items()}


def _sharing(plan: Plan) -> dict[str, int]:
    """Of its encode workers, how many are on the GPU of another worker; nothing where there are none."""
    sharers = {one.name for worker in plan.workers for one in plan.sharers(worker)}
    return {"encode_shared": len(sharers)} if "encode" in plan.expected_workers() else {}


def _router(plan: Plan) -> list[str]:
    """How the frontend picks workers: the end of its command line, which has no port or path any more."""
    argv = plan.processes[0].argv
    return list(argv[argv.index(_ROUTER) :]) if _ROUTER in argv else []


def _is_deterministic(plan: Plan) -> bool:
    """Its workers are told so on their command lines."""
    return any(_DETERMINISTIC in process.argv for process in plan.processes)


def _attached(told: Deployment | None) -> tuple[dict[str, Any], dict[str, Any]]:
    if told is None:
        return {"gpus": None}, {}
    gpus = None if told.gpu_names is None else sorted(set(told.gpu_names))
    return {"gpus": gpus}, {
        "server": told.server,
        "server_version": told.server_version,
        "engine": told.engine,
        "versions": told.versions,
        "workers": told.workers,
        "gpu_count": told.gpu_count,
        "deterministic": told.deterministic,
    }


def _flat(document: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in document.items():
        flat |= _flat(value, f"{parent}{name}.") if isinstance(value, Mapping) else {f"{parent}{name}": value}
    return flat
