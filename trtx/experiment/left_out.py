"""Reports config fields that a run's engines ignore, and refuses topologies that differ in nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from trtx.config import Role, TopologySpec
from trtx.config.engine_uses import acts_on
from trtx.config.left_out import LeftOutField, left_out_notes, left_out_warnings
from trtx.config.normal_form import normal_form
from trtx.errors import UsageError
from trtx.experiment.bench.axes import engine_field
from trtx.experiment.bench.spec import ExperimentSpec
from trtx.runs.forms import LeftOut
from trtx.topology import Plan


def tell_left_out(plans: Mapping[str, Plan], tell: Callable[[str], None]) -> None:
    """Reports the ignored fields of all plans through ``tell``, once per engine.

    Fields that the user typed give a warning; fields from recipes give a note.
    """
    for engine in dict.fromkeys(plan.engine for plan in plans.values()):
        fields = [one for plan in plans.values() if plan.engine == engine for one in plan.left_out]
        for warning in left_out_warnings(fields, engine):
            tell(f"trtx: warning: {warning}")
        for note in left_out_notes(fields, engine):
            tell(f"trtx: {note}")


def left_out_of(plan: Plan) -> dict[str, tuple[LeftOut, ...]]:
    """The ignored fields of a plan by role, in the run manifest's form. Roles without such fields are omitted."""
    found: dict[str, list[LeftOut]] = {}
    for one in plan.left_out:
        found.setdefault(one.role, []).append(LeftOut(one.path, one.value, one.source, one.is_typed))
    return {role: tuple(fields) for role, fields in found.items()}


def refuse_equal(spec: ExperimentSpec, plans: Mapping[str, Plan]) -> None:
    """Raises UsageError if the sweep would measure the same topology twice and compare it with itself.

    That is the case for an axis over a field that no worker acts on, for two topologies that differ only in such
    fields, and for two whose values are only written differently.
    """
    for axis in spec.axes:
        if (field := engine_field(axis)) is not None:
            for label, plan in plans.items():
                _refuse_idle_axis(axis, *field, label, plan)
    asked = {one.label: one.spec for one in spec.topologies}
    for one, other in itertools.combinations([label for label in asked if label in plans], 2):
        differing = [*dict.fromkeys(_differing(plans[one].left_out, plans[other].left_out))]
        if differing and _served(asked[one], plans[one]) == _served(asked[other], plans[other]):
            raise UsageError(
                f"{one} and {other} would be the same topology, measured twice: they differ in nothing but "
                f"{_listed(differing)}, which engine {plans[one].engine} ignores. Leave one of them out, or choose an "
                "engine that uses it"
            )
        is_meant = not spec.axes and asked[one].overrides == asked[other].overrides  # an A/A run
        if not is_meant and _alike(asked[one], plans[one]) == _alike(asked[other], plans[other]):
            raise UsageError(
                f"{one} and {other} would be the same topology, measured twice: their settings are written differently "
                "but mean the same to the engine; leave one of them out"
            )


def _alike(spec: TopologySpec, plan: Plan) -> tuple[Any, ...]:
    """A key that is equal for topologies with equivalent engine configs and otherwise equal settings."""
    configs = {role: normal_form(values, plan.engine) for role, values in plan.engine_configs.items()}
    return spec.model_dump(exclude={"engine", "engine_configs", "overrides"}), plan.engine, plan.model_path, configs


def _refuse_idle_axis(axis: str, role: Role | None, path: str, label: str, plan: Plan) -> None:
    roles: list[Any] = [one for one in plan.engine_configs if role in (one, None) and (role or one != "encode")]
    on_gpu = bool(plan.gpu_names)
    if roles and not any(acts_on(plan.engine, one, path, plan.engine_configs[one], on_gpu=on_gpu) for one in roles):
        where = "" if on_gpu or not acts_on(plan.engine, roles[0], path, {}, on_gpu=True) else " without a GPU"
        raise UsageError(
            f"axes.{axis} has no effect, because engine {plan.engine} ignores {path}{where}: {label} would be the same "
            "topology at each value. Leave the axis out, or choose an engine that uses it"
        )


def _differing(one: Iterable[LeftOutField], other: Iterable[LeftOutField]) -> Iterator[str]:
    """Yields the paths of fields that only one side has, or that have different values on the two sides."""
    sides = [{(field.role, field.path): field.value for field in side} for side in (one, other)]
    for key in dict.fromkeys((*sides[0], *sides[1])):
        if any(key not in side for side in sides) or sides[0][key] != sides[1][key]:
            yield key[1]


_MEASURED_ALIKE = {"engine", "engine_configs", "overrides", "tp", "model", "served_model_name", "host", "port", "gpus"}
"""Fields of a topology that the plan states more precisely, or that don't affect the measurement."""


def _served(spec: TopologySpec, plan: Plan) -> tuple[Any, ...]:
    rest = spec.model_dump(exclude=_MEASURED_ALIKE | {"tls_cert", "tls_key"})
    tls = spec.tls_cert is not None
    return rest, tls, plan.engine, plan.model_path, plan.engine_configs, plan.gpu_names


def _listed(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{', '.join(paths[:-1])} and {paths[-1]}"
