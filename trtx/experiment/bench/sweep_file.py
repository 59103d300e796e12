"""Reads a sweep file: merges it with options, refuses settings without effect, and names misspelt keys."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from trtx.bench import LoadSpec
from trtx.bench.documents import problem
from trtx.config import TopologySpec
from trtx.config.strict_json import validate_strictly
from trtx.config.strict_yaml import read_yaml
from trtx.config.topology import in_topology, refuse_idle
from trtx.config.wording import a_kind, quoted, shown
from trtx.errors import UsageError
from trtx.experiment.bench.axes import OWN_MODE, refuse_replaced
from trtx.experiment.bench.spec import Attach, ExperimentSpec
from trtx.experiment.gate_spec import GateSpec
from trtx.experiment.scoring_spec import ScoringSpec, in_keys

_ROLE_MODES = {"agg": "agg", "prefill": "disagg", "decode": "disagg"}
_COUNTS_ENCODERS = ("encode", "encode_shared")
_JOINED = ("overrides", "router_args")  # command-line values are appended to those of the file; the last one wins


def _refuse_what_yaml_blurs(document: dict[str, Any], path: Path | None) -> None:
    """Refuses two YAML pitfalls: an ``eval:`` whose lines are all commented out, and ``true`` in place of a number."""
    if "eval" in document and document["eval"] is None:
        raise UsageError(f"{_source(path)}eval is empty; expected tasks below it, such as tasks: [trtx], or no eval")
    models: dict[str, type[BaseModel]] = {"load": LoadSpec, "gate": GateSpec, "eval": ScoringSpec}
    for part, model in models.items():
        section = document.get(part)
        for name, value in section.items() if isinstance(section, dict) else ():
            field = model.model_fields.get(name)
            takes = "" if field is None else str(field.annotation)
            values = value if isinstance(value, list) else [value]
            if any(isinstance(one, bool) for one in values) and not any(kind in takes for kind in ("bool", "Any")):
                said_so = shown(json.dumps(value, default=str, ensure_ascii=False))
                raise UsageError(f"{_source(path)}{part}.{name} is {said_so}; expected a value that is not a boolean")


def load_sweep(path: Path | None, overrides: dict[str, Any]) -> ExperimentSpec:
    """Reads a sweep file, or uses the defaults, and merges ``overrides`` into it. Raises UsageError that names
    the key.
    """
    document: Any = (
        None if path is None else read_yaml(path, "sweep file", "a YAML file with keys such as modes and load")
    )
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise UsageError(f"sweep file {shown(path)} holds {a_kind(document)}; expected keys such as modes and load")
    if path is not None:
        _refuse_unused(document, path, narrowed="modes" in overrides)
    refuse_replaced(document, overrides, _source(path))
    document = _laid_over(document, overrides)
    _refuse_unencoded(document, path)
    if document.get("attach") is not None and (unused := [key for key in ("modes", "topology") if key in document]):
        raise UsageError(
            f"{_source(path)}attach measures a running server, and {unused[0]} configures what trtx serves; "
            "leave one of them out"
        )
    if document.get("arms") and (unused := [key for key in ("modes", "topology", "axes") if key in document]):
        raise UsageError(
            f"{_source(path)}arms are complete topologies, so {unused[0]} would have no effect; leave one of them out"
        )
    _refuse_what_yaml_blurs(document, path)
    topology = document.get("topology") or {}
    if isinstance(topology, dict):  # other types are refused by the model
        document["topology"] = {"port": 0, **topology}
    if isinstance(arms := document.get("arms"), dict):
        document["arms"] = {label: {"port": 0, **arm} if isinstance(arm, dict) else arm for label, arm in arms.items()}
    try:
        if isinstance(document.get("eval"), dict):  # its own errors use the wording of trtx eval
            try:
                ScoringSpec.model_validate(document["eval"])
            except UsageError as error:
                raise UsageError(f"{_source(path)}{in_keys(str(error))}") from error
            except ValidationError:
                pass  # reported below, with the position in the file
        spec = validate_strictly(ExperimentSpec, document)
    except ValidationError as error:
        if error.errors()[0]["type"] == "json_invalid":
            raise UsageError(
                f"{_source(path)}it has a text with half a Unicode character (a lone surrogate); write the text again"
            ) from error
        raise UsageError(_sentence(error, path)) from error
    for one in spec.topologies:
        refuse_idle(one.spec, in_topology, _source(path))
    if spec.eval is not None and "max_drop" in spec.eval.model_fields_set and spec.gate.baseline is None:
        raise UsageError(
            f"{_source(path)}eval.max_drop has no effect without a baseline (--baseline); name one, or leave it out"
        )
    return spec


def _refuse_unused(document: dict[str, Any], path: Path, *, narrowed: bool) -> None:
    """Raises UsageError for topology settings in a sweep file that none of its topologies would use.

    ``narrowed``: modes were given on the command line, so the modes of the file don't apply.
    """
    topology = document.get("topology")
    if not isinstance(topology, dict):
        return
    if "mode" in topology:
        raise UsageError(f"{_source(path)}topology.mode is not a field of a sweep; use modes at the top level")
    modes = document.get("modes", ["agg"])
    if narrowed or not isinstance(modes, list):
        return
    configs, sets = topology.get("engine_configs"), topology.get("overrides")
    keys = [(f"topology.{name}", mode) for name, mode in OWN_MODE.items() if name in topology]
    for role, mode in _ROLE_MODES.items():
        keys += [(f"topology.engine_configs.{role}", mode)] if isinstance(configs, dict) and role in configs else []
        keys += [
            (f"topology.overrides {quoted(text)}", mode)
            for text in (sets if isinstance(sets, list) else ())
            if isinstance(text, str) and text.startswith(f"{role}.")
        ]
    for name, mode in keys:
        if mode not in modes:
            raise UsageError(
                f"{_source(path)}{name} belongs to mode {mode}, and modes are {shown(', '.join(map(str, modes)))}; "
                "leave it out, or add the mode"
            )


def _refuse_unencoded(document: dict[str, Any], path: Path | None) -> None:
    """Raises UsageError for encode-worker configs if no topology has encode workers."""
    topology, axes = document.get("topology"), document.get("axes")
    if not isinstance(topology, dict) or (isinstance(axes, dict) and axes.keys() & _COUNTS_ENCODERS):
        return
    if any(map(topology.get, _COUNTS_ENCODERS)):
        return
    configs, sets = topology.get("engine_configs"), topology.get("overrides")
    keys = ["topology.engine_configs.encode"] if isinstance(configs, dict) and "encode" in configs else []
    keys += [
        f"topology.overrides {quoted(text)}"
        for text in (sets if isinstance(sets, list) else ())
        if isinstance(text, str) and text.startswith("encode.")
    ]
    if keys:
        raise UsageError(
            f"{_source(path)}{keys[0]} is for encode workers, but the topology has none; leave it out, or set "
            "topology.encode to 1"
        )


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        before = merged.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            merged[key] = _laid_over(before, value)
        elif key in _JOINED and isinstance(before, list):
            merged[key] = [*before, *value]
        else:
            merged[key] = value
    return merged


def _source(path: Path | None) -> str:
    return "" if path is None else f"{shown(path)}: "


def _sentence(error: ValidationError, path: Path | None) -> str:
    first = error.errors()[0]
    if first["type"] != "extra_forbidden":
        sentence = problem(error)
        return f"{_source(path)}{in_keys(sentence) if first['loc'][:1] == ('eval',) else sentence}"
    field = ".".join(str(part) for part in first["loc"])
    places, section = _places(), field.rpartition(".")[0]
    near = get_close_matches(str(first["loc"][-1]), places, n=1)
    hint = ""
    if near:
        is_here = any(place.rpartition(".")[0] == section for place in places[near[0]])
        hint = f"; did you mean {near[0] if is_here else places[near[0]][0]}?"
    return f"{_source(path)}{shown(field)} is not a field of a sweep{hint}"


def _places() -> dict[str, list[str]]:
    """Returns the paths of each field name in a sweep file."""
    sections: dict[str, type[BaseModel]] = {
        "": ExperimentSpec,
        "topology.": TopologySpec,
        "load.": LoadSpec,
        "attach.": Attach,
        "gate.": GateSpec,
        "eval.": ScoringSpec,
    }
    found: dict[str, list[str]] = {}
    for section, model in sections.items():
        for name in model.model_fields:
            found.setdefault(name, []).append(f"{section}{name}")
    return found
