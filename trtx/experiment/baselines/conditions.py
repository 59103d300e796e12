"""The conditions under which a run was measured, which decide whether two runs may be compared.

They are stored in a run's ``conditions.json`` before anything starts, and in every baseline. A condition is named by
group and key, ``machine.cpu``. An unknown value is None, which differs from any known value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from trtx.bench import Cell, Load, LoadSpec
from trtx.config.wording import quoted, with_list
from trtx.errors import UsageError
from trtx.experiment.bench.spec import ExperimentSpec
from trtx.experiment.left_out import left_out_of
from trtx.experiment.scoring_spec import ScoringSpec
from trtx.runs.forms import Deployment, Difference, Environment, LeftOut, MeasuredMode, Provenance
from trtx.topology import Plan, weight_engines

_ROUTER = "--router-mode"
_DETERMINISTIC = "--deterministic"
# Groups in which two runs must agree, because metrics that differ in one of them don't show the effect of a change. The
# other groups are what users change: topologies, configs, versions.
COMPARED_BY = ("model", "load", "machine")
_ALWAYS = ("model.name", "model.weights", "machine.gpus", "machine.cpu", "machine.cpu_cores")
_JUDGED_BY = {"min_score", "max_drop"}
_AXES = {"trials", "cells"}  # load fields that don't belong to the load of a single cell


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions of one run, by group. Values are plain JSON values."""

    model: dict[str, Any]  # of all topologies, or by topology if they serve different models
    load: dict[str, Any]  # common to all cells; each cell also has its own load
    machine: dict[str, Any]
    topology: dict[str, Any]
    versions: dict[str, Any]
    eval: dict[str, Any] = field(default_factory=dict)  # the requested scoring; empty without one, and for older runs


def conditions_of(spec: ExperimentSpec, plans: Mapping[str, Plan], provenance: Provenance) -> Conditions:
    """Conditions of a run that is about to start. ``plans``: by topology; empty for an attached run."""
    environment, load = provenance.environment, spec.load.model_dump(mode="json")
    load["input_file"] = provenance.dataset_sha256  # the file's location doesn't matter
    own = {one.name for one in fields(Load)} | _AXES
    machine, topology = _served(plans, environment) if plans else _attached(environment.deployment)
    if spec.gpu_hour_price is not None:
        topology["gpu_hour_price"] = spec.gpu_hour_price
    return Conditions(
        model=_model(provenance),
        load={name: load[name] for name in LoadSpec.model_fields if name not in own},
        machine={**machine, "cpu": environment.cpu, "cpu_cores": environment.cpu_cores},
        topology=topology,
        versions=_versions(environment),
        eval={} if spec.eval is None else _asked(spec.eval),
    )


def conditions_of_scores(asked: ScoringSpec, plans: Mapping[str, Plan], provenance: Provenance) -> Conditions:
    """Conditions of a run without speed measurements, from its directory. They have no load."""
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
    """The settings that determine the requests of a scoring. Limits for the verdict are not included."""
    asked = scoring.model_dump(mode="json", include=set(ScoringSpec.model_fields) - _JUDGED_BY)
    return {name: _UNASKED.get(name, "none") if value is None else value for name, value in asked.items()}


# Descriptions of the default, which is a known value, for settings that were not given.
_UNASKED = {
    "limit": "all",
    "num_fewshot": "as each task says",
    "needle_lengths": "by the context",
    "structured_output": "as each task says",
}
# Values of the settings that the oldest baselines lack.
_BEFORE_THEY_EXISTED = {"schemas": "none", "structured_output": "as each task says"}


def differences(before: Conditions, now: Conditions) -> tuple[Difference, ...]:
    """The differences between two runs, starting with those that make metrics incomparable.

    Load and scoring are skipped if one of the runs has none.
    """
    sides = [asdict(before), asdict(now)]
    sides = [{**side, "eval": _BEFORE_THEY_EXISTED | side["eval"]} if side["eval"] else side for side in sides]
    for group in ("load", "eval"):
        if not all(side[group] for side in sides):
            sides = [{**side, group: {}} for side in sides]
    alone = tuple(_of_one_side(*sides))
    found = (*differing(*map(_flat, sides)), *alone)
    return tuple(sorted(found, key=lambda one: (one.group not in COMPARED_BY, one.group != "topology")))


def _of_one_side(before: dict[str, Any], now: dict[str, Any]) -> Iterator[Difference]:
    """One difference for each topology that only one run served, instead of one per key.

    Removes the topology from ``before`` or ``now``. The deployment of an attached run has no label.
    """
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
    """The differing values by name: in the order of ``before``, followed by names that only ``now`` has."""
    for name in dict.fromkeys((*before, *now)):
        if before.get(name) != now.get(name):
            yield Difference(name, before.get(name), now.get(name))


def unchecked(before: Conditions, now: Conditions) -> tuple[str, ...]:
    """Conditions that comparisons rely on and that neither run knows."""
    both = [_flat(asdict(one)) for one in (before, now)]
    return tuple(name for name in _ALWAYS if not any(_knows(flat, name) for flat in both))


def _knows(flat: Mapping[str, Any], name: str) -> bool:
    """Whether a condition is known, also if each topology has its own model: ``model.fp8.name`` for ``model.name``."""
    group, _, key = name.partition(".")
    return any(value is not None for at, value in flat.items() if at.startswith(f"{group}.") and at.endswith(f".{key}"))


def load_differences(cells: Iterable[Cell], loads: Mapping[str, Load]) -> tuple[Difference, ...]:
    """The differences between the loads of cells with equal names, each once."""
    found: dict[str, Difference] = {}
    for cell in cells:
        if cell.name in loads:
            before, now = asdict(cell.load), asdict(loads[cell.name])
            for key in before:
                if before[key] != now[key]:
                    found.setdefault(f"load.{key}", Difference(f"load.{key}", before[key], now[key]))
    return tuple(found.values())


def refuse_others(source: str, found: Sequence[Difference], allowed: Sequence[str]) -> None:
    """Raises UsageError for a difference that makes two runs incomparable, unless its name or group is ``allowed``.

    Also raises UsageError for an allowed name that isn't a condition.
    """
    named = {one.name for one in found}
    of_load = {*LoadSpec.model_fields, *(one.name for one in fields(Load))} - _AXES
    known = {*named, *COMPARED_BY, *_ALWAYS, *(f"load.{name}" for name in of_load)}
    for key in allowed:
        if key not in known:
            near = get_close_matches(key, known, n=3, cutoff=0.5)
            expected = f"did you mean {' or '.join(near)}" if near else f"expected one of {', '.join(sorted(known))}"
            raise UsageError(f"--allow-different {quoted(key)} is not a condition of baselines; {expected}")
    refused = [
        one for one in found if one.group in COMPARED_BY and one.name not in allowed and one.group not in allowed
    ]
    if refused:
        ways = " ".join(f"--allow-different {one.name}" for one in refused)
        problem = f"{source} was measured under other conditions; use the same, or allow the difference with {ways}"
        raise UsageError(with_list(problem, [str(one) for one in refused]))


def _versions(environment: Environment) -> dict[str, Any]:
    return {
        **environment.versions,
        "python": environment.python,
        "gpu_driver": environment.gpu_driver,
        "trtx_sources": environment.trtx_sources,
    }


def _model(provenance: Provenance) -> dict[str, Any]:
    if provenance.environment.deployment is not None:  # an attached run has only a tokenizer's files
        return {"name": provenance.environment.deployment.model, "weights": None}
    models = {label: model_of(measured) for label, measured in provenance.measured.items()}
    first, *others = models.values()
    return first if all(model == first for model in others) else models


def model_of(measured: MeasuredMode) -> dict[str, Any]:
    """The model of one topology that was served here."""
    return {"name": measured.model, "weights": measured.files.sampled_sha256[:16]}


def _served(plans: Mapping[str, Plan], environment: Environment) -> tuple[dict[str, Any], dict[str, Any]]:
    # Only GPU models: unused GPUs don't matter, and the number of used ones belongs to the topology.
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
    """Engine-config fields that are not in force, by role and field, so that a reader doesn't take them for a cause."""
    return {role: {one.field: one.value for one in fields} for role, fields in left_out.items()}


def _sharing(plan: Plan) -> dict[str, int]:
    """The number of encode workers that share another worker's GPU, and of workers that share a copy of the weights;
    without encode workers, and without such a copy, it is left out.
    """
    sharers = {one.name for worker in plan.workers for one in plan.sharers(worker)}
    engines = max(weight_engines(worker.argv) for worker in plan.workers)
    encode = {"encode_shared": len(sharers)} if "encode" in plan.expected_workers() else {}
    return encode | ({"share_weights": engines} if engines > 1 else {})


def _router(plan: Plan) -> list[str]:
    """The frontend's routing options: the end of its command line, which contains no ports or paths."""
    argv = plan.processes[0].argv
    return list(argv[argv.index(_ROUTER) :]) if _ROUTER in argv else []


def _is_deterministic(plan: Plan) -> bool:
    """Whether a worker's command line has --deterministic."""
    return any(_DETERMINISTIC in process.argv for process in plan.processes)


def _attached(deployment: Deployment | None) -> tuple[dict[str, Any], dict[str, Any]]:
    if deployment is None:
        return {"gpus": None}, {}
    gpus = None if deployment.gpu_names is None else sorted(set(deployment.gpu_names))
    return {"gpus": gpus}, {
        "server": deployment.server,
        "server_version": deployment.server_version,
        "engine": deployment.engine,
        "versions": deployment.versions,
        "workers": deployment.workers,
        "gpu_count": deployment.gpu_count,
        "deterministic": deployment.deterministic,
    }


def _flat(document: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in document.items():
        flat |= _flat(value, f"{parent}{name}.") if isinstance(value, Mapping) else {f"{parent}{name}": value}
    return flat
