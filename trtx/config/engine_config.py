"""Engine configs: one YAML file for each role, with TensorRT-LLM's own field names.

The base is the file that the user named, else the file that ``trtx build`` wrote in the checkpoint directory, else the
shipped ``engine_configs/<family>/<role>.yaml``. On top of it come ``--set a.b=c`` for every role and then ``--set
<role>.a.b=c`` for one role; the last assignment to a field wins.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from trtx.config.engine_uses import acts_on
from trtx.config.families import CONFIG_ROOT, ConfigHeader, built_files, read_header, shown_path
from trtx.config.files import read_text
from trtx.config.strict_yaml import parse_yaml
from trtx.config.topology import Role
from trtx.config.wording import quoted, shown
from trtx.errors import UsageError

# Defaults for a model without a shipped file: the values of every published prefill worker with the C++ transceiver.
_WITHOUT_FILE: dict[Role, dict[str, Any]] = {"prefill": {"disable_overlap_scheduler": True, "cuda_graph_config": None}}


@dataclass(frozen=True, slots=True)
class ResolvedEngineConfig:
    """The LLM's keyword arguments for one role, with their source and the reason for each override.

    ``header``: the versions, GPUs and model that the file was written for. ``overridden``: maps each path that
    ``--set`` assigned, and each section that the assignment created around it, to the assignment as typed. ``is_own``:
    the user named the file, and trtx does not ship it.
    """

    role: Role
    values: dict[str, Any]
    source: str
    reasons: tuple[str, ...]
    header: ConfigHeader | None = None
    overridden: Mapping[str, str] = field(default_factory=dict)
    is_own: bool = False


def load_engine_config(
    role: Role,
    *,
    family: str,
    path: Path | None,
    overrides: tuple[str, ...],
    engine: str,
    model_dir: Path | None = None,
) -> ResolvedEngineConfig:
    """Loads the config of one role and applies the overrides, without checking the values.

    ``model_dir``: the checkpoint directory, where ``trtx build`` writes the configs that it resolved. Raises UsageError
    for a file that can't be read, and for an assignment that can't be parsed or applied.
    """
    values, source, header = _from_file(role, family, path, model_dir)
    reasons = [f"{role}: engine config from {source}"]
    if source == _NO_FILE and engine == "tensorrt-llm":
        values = copy.deepcopy(_WITHOUT_FILE.get(role, {}))
        reasons += [f"{role}: {key} = {value!r} because there is no file to say so" for key, value in values.items()]
    overridden: dict[str, str] = {}
    for text, key, value in _assignments(overrides, role):
        before, made = _set(values, key, value)
        overridden |= dict.fromkeys((*made, key), text)
        reasons.append(f"{role}: {key} = {value!r} from --set" + ("" if before is None else f", was {before!r}"))
    if role in ("prefill", "decode") and "cache_transceiver_config" not in values and _has_transceiver(engine, role):
        values["cache_transceiver_config"] = {"backend": "DEFAULT"}
        reasons.append(
            f"{role}: cache_transceiver_config.backend = 'DEFAULT' because disaggregation needs a KV transport"
        )
    is_own = path is not None and not path.resolve().is_relative_to(CONFIG_ROOT)
    return ResolvedEngineConfig(role, values, source, tuple(reasons), header, overridden, is_own)


def _has_transceiver(engine: str, role: Role) -> bool:
    return acts_on(engine, role, "cache_transceiver_config.backend", {}, on_gpu=False)


def given_path(overridden: Collection[str], path: str) -> str | None:
    """Returns the innermost path in ``overridden`` that is ``path`` itself or a section around it, or None."""
    around = [given for given in overridden if f"{path}.".startswith(f"{given}.")]
    return max(around, key=len, default=None)


_NO_FILE = "the engine's defaults"


def _from_file(
    role: Role, family: str, path: Path | None, model_dir: Path | None
) -> tuple[dict[str, Any], str, ConfigHeader | None]:
    shipped = CONFIG_ROOT / family / f"{role}.yaml"
    found = path or (built_files(model_dir).get(role) if model_dir else None)
    if found is None and family and shipped.is_file():
        found = shipped
    if found is None:
        return {}, _NO_FILE, None
    source = shown_path(found)
    text = read_text(found, "engine config", _EXPECTED)
    return _mapping(text, source), source, read_header(text, source)


_EXPECTED = "a YAML file with TensorRT-LLM's field names, such as those in engine_configs/"


def _mapping(text: str, source: str) -> dict[str, Any]:
    values = parse_yaml(text, f"engine config {shown(source)}")
    if values is None:
        return {}
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise UsageError(f"engine config {shown(source)} holds a {kind}; expected a mapping of field: value")
    return values


def _assignments(overrides: Iterable[str], role: Role) -> Iterable[tuple[str, str, object]]:
    """Returns (text as typed, path, value) for each assignment that applies to ``role``, in order of application.

    A later assignment to the same field wins, because users paste a finding's fix behind the option that it corrects.
    """
    everyone, this_role = [], []
    for text in overrides:
        key, value = _assignment(text)
        head, _, rest = key.partition(".")
        if head not in get_args(Role):
            everyone.append((text, key, value))
        elif head == role:
            this_role.append((text, rest, value))
    return everyone + this_role


def _assignment(text: str) -> tuple[str, object]:
    """Parses one ``--set`` into its path and its value. Raises UsageError."""
    key, equals, raw = text.partition("=")
    if not equals or not key or any(not part.strip() for part in key.split(".")) or key in get_args(Role):
        raise UsageError(f"--set {quoted(text)} is not an assignment; expected a.b=value, for one role role.a.b=value")
    if not raw.strip():
        raise UsageError(f"--set {quoted(text)} has no value; give one, or null for none at all")
    return key, parse_yaml(raw, f"--set {quoted(text)}", is_file=False)


def _set(values: dict[str, Any], key: str, value: object) -> tuple[object, tuple[str, ...]]:
    """Assigns ``value`` in place; returns the field's previous value and the paths of the sections it created."""
    *parents, leaf = key.split(".")
    node, path = values, ""
    made: list[str] = []
    for parent in parents:
        child, path = node.get(parent), f"{path}.{parent}" if path else parent
        if child is None:
            child = node[parent] = {}
            made.append(path)
        elif not isinstance(child, dict):
            raise UsageError(f"--set {shown(key)}=… needs a section {shown(path)}, and that is {quoted(child)}")
        node = child
    before = copy.copy(node.get(leaf))
    node[leaf] = value
    return before, tuple(made)
