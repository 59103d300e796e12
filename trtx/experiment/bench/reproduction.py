"""Repeats a run from its manifest alone: lists the differences to this machine, and rebuilds the spec.

The manifest is sufficient. If an engine config that was given by path doesn't exist here, the resolved one from the
manifest is used. Differences that would change the measured system (engine, model name, number of GPUs) are refused;
all others are reported.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from trtx.bench import check_endpoint, check_settings
from trtx.bench.documents import RESTORE
from trtx.config import TopologySpec
from trtx.config.wording import shown
from trtx.errors import UsageError
from trtx.experiment.baselines.conditions import differing
from trtx.experiment.bench.spec import ExperimentSpec
from trtx.experiment.deployment import ask_deployment
from trtx.experiment.directory import spec_of
from trtx.experiment.environment import environment
from trtx.experiment.provenance import provenance_of
from trtx.experiment.targets import attached_target
from trtx.launch import prepare
from trtx.runs.forms import LOCK, AskedRun, Difference, LeftOut, MeasuredMode, Provenance
from trtx.topology import Plan

# Values of a single start or location, which are not conditions, or whose information other fields also contain.
_OF_ONE_START = {"started_at", "command", "load_average", "sm_clocks_mhz"}
_OF_A_PLACE = ("--url", "--tokenizer", "--artifact-dir", "--input-file")


@dataclass(frozen=True, slots=True)
class Locked:
    """A run manifest that has been read."""

    path: Path
    spec: ExperimentSpec
    provenance: Provenance


def read_locked(path: Path) -> Locked:
    """Reads a run manifest from its path or its run directory. Raises UsageError with file, field and expected
    value.
    """
    path = path / LOCK.file if path.is_dir() else path
    fields = LOCK.load_file(path)
    asked = LOCK.restored(fields, AskedRun, str(path))
    spec = spec_of(fields, str(path))
    if sorted(asked.provenance.measured) != sorted(spec.labels):
        labels = [", ".join(names) or "nothing" for names in (asked.provenance.measured, spec.labels)]
        raise UsageError(
            f"{path}: provenance.measured has {labels[0]}; expected {labels[1]}, its topologies; {RESTORE}"
        )
    return Locked(path, spec, asked.provenance)


def differences_here(locked: Locked) -> tuple[Difference, ...]:
    """The differences between a manifest and this machine. Plans every topology but starts nothing.

    Raises UsageError if the run can't be repeated here because an engine, GPUs, a model or a deployment is missing.
    """
    check_endpoint()
    check_settings()
    with tempfile.TemporaryDirectory(prefix="trtx-") as scratch:
        spec = spec_to_run(locked, Path(scratch))
        try:
            here = _provenance_here(spec, Path(scratch))
        except UsageError as error:
            raise UsageError(f"{shown(str(locked.path))} can't be reproduced here: {error}") from error
    for label, then in locked.provenance.measured.items():
        _refuse_another(locked, label, then, here.measured[label])
    return tuple(differing(_facts(locked.provenance), _facts(here)))


def spec_to_run(locked: Locked, parent: Path) -> ExperimentSpec:
    """The spec of a manifest, adapted to this machine.

    ``auto`` is replaced with the engine that it selected in the original run. Engine configs whose path doesn't exist
    here are written under ``parent`` in their resolved form. Raises UsageError if that fails.
    """
    gate = locked.spec.gate.model_copy(update={"save_baseline": None})  # the original run uses this name
    spec, measured = locked.spec.model_copy(update={"gate": gate}), locked.provenance.measured
    if spec.arms:
        arms = {label: _here(locked, arm, [measured[label]], parent) for label, arm in spec.arms.items()}
        return spec.model_copy(update={"arms": arms})
    return spec.model_copy(update={"topology": _here(locked, spec.topology, [*measured.values()], parent)})


def _here(locked: Locked, topology: TopologySpec, measured: Sequence[MeasuredMode], parent: Path) -> TopologySpec:
    changes: dict[str, Any] = {}
    engine = measured[0].engine
    if topology.engine == "auto" and engine is not None:
        changes["engine"] = engine
    absent = {role for role, path in topology.engine_configs.items() if not path.expanduser().exists()}
    resolved: dict[str, dict[str, Any]] = {
        role: _as_given(config, (one.left_out or {}).get(role, ()))
        for one in measured
        for role, config in (one.engine_configs or {}).items()
        if role in absent
    }
    if resolved:
        changes["engine_configs"] = {**topology.engine_configs, **_written(locked, resolved, parent)}
    return topology.model_copy(update=changes)


def _as_given(in_force: Mapping[str, Any], left_out: Sequence[LeftOut]) -> dict[str, Any]:
    """A config including the fields that its engine ignored, which the repeated run will report again."""
    values: dict[str, Any] = copy.deepcopy(dict(in_force))
    for one in left_out:
        *sections, name = one.field.split(".")
        part = values
        for section in sections:
            part = part.setdefault(section, {})
        part[name] = one.value
    return values


def _written(locked: Locked, resolved: Mapping[str, dict[str, Any]], parent: Path) -> dict[str, Path]:
    """Writes each config to a file. The directory's name contains a hash of the content, so a second run reuses it."""
    digest = hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()[:8]
    directory = parent.absolute() / f"engine-configs-{digest}"
    files = {role: directory / f"{role}.yaml" for role in resolved}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for role, file in files.items():
            file.write_text(yaml.safe_dump(resolved[role], sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"the engine configs of {shown(str(locked.path))} can't be written to {shown(str(directory))} "
            f"({error.strerror or error}); name another directory with -o"
        ) from error
    return files


def _provenance_here(spec: ExperimentSpec, scratch: Path) -> Provenance:
    deployment = None if spec.attach is None else ask_deployment(spec.attach)
    attached = attached_target(spec.attach, deployment) if spec.attach and deployment else None
    plans: dict[str, Plan] = {}
    if attached is None:
        plans |= {one.label: prepare(one.spec, run_dir=scratch / one.label) for one in spec.topologies}
    return provenance_of(spec, environment((), datetime.now(UTC), deployment), plans, attached)


def _refuse_another(locked: Locked, label: str, then: MeasuredMode, here: MeasuredMode) -> None:
    """Raises UsageError for differences that make it a different measurement and not just a different machine."""
    gpus = [len(one.gpu_names or ()) for one in (then, here)]
    compared = (
        ("engine", then.engine, here.engine, "install what it needs"),
        ("number of GPUs", *map(str, gpus), "run it where there are as many, or hide some with CUDA_VISIBLE_DEVICES"),
        ("model", then.model, here.model, "put the model where the run manifest names it"),
    )
    source = shown(str(locked.path))
    for what, before, now, way_out in compared:
        if before != now:
            raise UsageError(
                f"{source} can't be reproduced here: {what} of {label} was {before} and would be {now}; {way_out}"
            )


def _facts(provenance: Provenance) -> dict[str, str]:
    """All compared values, named as in the manifest; names of a topology's values begin with its label."""
    of_machine = {name: value for name, value in asdict(provenance.environment).items() if name not in _OF_ONE_START}
    facts = dict(_flat(of_machine)) | dict(_flat(provenance.dataset_sha256, "dataset_sha256"))
    for label, measured in provenance.measured.items():
        fields = asdict(measured)
        fields["aiperf"] = {cell: _options(shlex.split(call)) for cell, call in measured.aiperf.items()}
        facts |= dict(_flat(fields, label))
    return facts


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of mappings and lists with their dotted names; None and empty containers yield nothing."""
    entries: Sequence[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        entries = list(value.items())
    elif isinstance(value, (list, tuple)):
        entries = list(enumerate(value))
    elif value is not None:
        yield name, str(value)
    for key, inner in entries:
        yield from _flat(inner, f"{name}.{key}" if name else str(key))


def _options(argv: Sequence[str]) -> dict[str, str]:
    """The options of an aiperf command with their values."""
    options: dict[str, str] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name, options[word] = word, "given"
        elif name:
            options[name] = word
    return {option: value for option, value in options.items() if option not in _OF_A_PLACE}
