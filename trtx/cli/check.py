"""``trtx build --check``: checks the engine configs of a model, a recipe or given files.

The checks are the schema, the rules and the memory plan.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import typer

from trtx.cli.findings_text import describe_findings
from trtx.cli.memory_text import describe_memory
from trtx.cli.sentences import fill
from trtx.config import (
    Finding,
    Mode,
    ModelFacts,
    ResolvedEngineConfig,
    Role,
    built_files,
    check_engine_configs,
    config_family,
    load_engine_config,
    recipe_files,
    recipe_names,
    schema,
)
from trtx.config.check import checked_version
from trtx.config.files import name_problem
from trtx.config.findings import SEVERITIES, Severity
from trtx.config.left_out import LeftOutField, left_out_messages, without_left_out
from trtx.config.versions import SchemaVersion
from trtx.config.wording import quoted, shown
from trtx.errors import UsageError
from trtx.memory import MemoryPlan, UnknownShapeError, device_named, plan_memory

_ENGINE = "tensorrt-llm"  # the engine that the configs are checked for
_WIDTH = 80
_NEEDED: dict[Mode, tuple[Role, ...]] = {"agg": ("agg",), "disagg": ("prefill", "decode")}


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """The configs to check.

    ``files``: those of ``--config``. ``version``: the TensorRT-LLM version to check for; None: the version in the
    files' headers.
    """

    model: str | None
    modes: tuple[Mode, ...]
    recipe: str | None
    files: Mapping[Role, Path]
    overrides: tuple[str, ...]
    version: str | None
    gpu: str | None
    every_recipe: bool


@dataclass(frozen=True, slots=True)
class _Checked:
    name: str
    version: SchemaVersion
    configs: tuple[ResolvedEngineConfig, ...]
    findings: tuple[Finding, ...]
    memory: tuple[MemoryPlan, ...]
    left_out: tuple[LeftOutField, ...]


def check(request: CheckRequest, *, as_json: bool) -> int:
    """Prints every finding of every topology. Returns 2 if one is an error, else 0."""
    if request.gpu is not None:
        device_named(request.gpu)  # refuses an unknown GPU
    checked = list(_checked(request))
    if as_json:
        typer.echo(json.dumps([_document(topology) for topology in checked], indent=1))
    else:
        typer.echo("\n".join(line for topology in checked for line in _lines(topology)))
    return 2 if any(finding.severity == "error" for topology in checked for finding in topology.findings) else 0


def _checked(request: CheckRequest) -> Iterator[_Checked]:
    if request.every_recipe:
        for name in recipe_names():
            yield from _topologies(name, replace(request, files=recipe_files(name)))
        return
    directory = None if request.model is None else _model_directory(request.model)
    facts = None if directory is None else _facts(directory)
    name = request.recipe or (config_family(facts.architecture, on_gpu=True) if facts else "")
    if not name and not request.files:
        raise UsageError("nothing to check; expected a MODEL, --recipe NAME, --config ROLE=FILE or --all")
    shipped = recipe_files(name) if request.recipe or name in recipe_names() else {}
    # A checkpoint made by trtx build has its own configs, which --recipe and --config replace.
    built = {} if directory is None or request.recipe else built_files(directory)
    files = {**shipped, **built, **request.files}
    yield from _topologies(name or "files", replace(request, files=files), directory, facts)


def _topologies(
    name: str, request: CheckRequest, directory: Path | None = None, facts: ModelFacts | None = None
) -> Iterator[_Checked]:
    """Yields one checked topology for each mode that has files, or for every mode if a model is given.

    If the files belong to no mode, they are checked by themselves.
    """
    found = False
    for mode in request.modes:
        needed = [role for role in _NEEDED[mode] if directory is not None or role in request.files]
        if needed:
            found = True
            encoder: list[Role] = ["encode"] if "encode" in request.files else []
            yield _topology(f"{name}, {mode}", [*needed, *encoder], request, directory, facts)
    if not found:
        yield _topology(name, list(request.files), request, directory, facts)


def _topology(
    name: str, roles: list[Role], request: CheckRequest, directory: Path | None, facts: ModelFacts | None
) -> _Checked:
    configs = {
        role: load_engine_config(
            role, family="", path=request.files.get(role), overrides=request.overrides, engine=_ENGINE
        )
        for role in roles
    }
    gpus = (request.gpu,) if request.gpu else ()
    findings = check_engine_configs(configs, version=request.version, model=facts, gpus=gpus)
    left_out = tuple(one for config in configs.values() for one in without_left_out(config, _ENGINE, on_gpu=True)[1])
    memory: list[MemoryPlan] = []
    if directory is not None and request.gpu is not None:
        broken = frozenset(
            role
            for finding in findings
            if finding.severity == "error" and finding.rule in get_args(schema.Kind)
            for role in finding.roles
        )
        findings += tuple(_plan_memory(configs, directory, request.gpu, memory, broken))
    return _Checked(
        name, checked_version(configs, request.version), tuple(configs.values()), findings, tuple(memory), left_out
    )


def _plan_memory(
    configs: Mapping[Role, ResolvedEngineConfig],
    directory: Path,
    gpu: str,
    planned: list[MemoryPlan],
    broken: frozenset[Role],
) -> Iterator[Finding]:
    """Appends the memory plan of each role to ``planned``, and yields findings for roles that can't be planned.

    A role may not fit on the GPU, or the model's shape may be unknown. Roles in ``broken`` are skipped: their fields
    have findings already.
    """
    device = device_named(gpu)
    for role, config in configs.items():
        if role == "encode" or role in broken:
            continue
        severity: Severity = "error"
        try:
            planned.append(plan_memory(directory, role, config.values, engine="tensorrt-llm", device=device))
            continue
        except UsageError as refusal:
            message = str(refusal)
        except UnknownShapeError as unknown:
            severity, message = "note", str(unknown)
        yield Finding(
            severity, "memory", (role,), "", message, f"planned for one worker on {gpu}", "trtx's memory plan"
        )


def _model_directory(model: str) -> Path:
    """Returns the directory of a model's ``config.json``. Downloads nothing, because the check needs no weights."""
    from trtx.checkpoint import resolve_checkpoint

    if problem := name_problem(model):
        raise UsageError(
            f"model {quoted(model)} {problem}; expected a directory, a name of the hub or a synthetic shape"
        )
    directory = Path(model).expanduser()
    if (directory / "config.json").is_file():
        return directory
    if directory.exists() or model.startswith(("synthetic:", ".", "/", "~")):
        return resolve_checkpoint(model).path
    from trtx.checkpoint.hub import load_hub

    hub = load_hub()
    try:
        cached = hub.try_to_load_from_cache(model, "config.json")
    except ValueError as error:
        raise UsageError(
            f"model {quoted(model)} is neither a directory nor a Hugging Face name; expected one such as Qwen/Qwen3-8B"
        ) from error
    if not isinstance(cached, str):
        raise UsageError(
            f"config.json of {quoted(model)} is not in the Hugging Face cache; fetch it with "
            f"hf download {shown(model)} config.json, or check a --recipe without a model"
        )
    return Path(cached).parent


def _facts(directory: Path) -> ModelFacts:
    from trtx.checkpoint.facts import architecture_of, context_length_of, read_config

    config = read_config(directory)
    return ModelFacts(architecture_of(config), context_length_of(config))


def _lines(checked: _Checked) -> Iterator[str]:
    counts = Counter(finding.severity for finding in checked.findings)
    told = ", ".join(
        f"{counts[severity]} {severity}{'s' * (counts[severity] > 1)}" for severity in SEVERITIES if counts[severity]
    )
    yield f"{checked.name}: {told or 'nothing to say'} (TensorRT-LLM {checked.version.how_sure})"
    for config in checked.configs:
        yield f"  {config.role}: {config.source}"
    yield from describe_memory(checked.memory)
    for line in left_out_messages(checked.left_out, _ENGINE):
        yield from fill(f"  {line}", _WIDTH)
    if checked.findings:
        yield from describe_findings(checked.findings)
    yield ""


def _document(checked: _Checked) -> dict[str, Any]:
    return {
        "name": checked.name,
        "tensorrt_llm": checked.version.name,
        "columns": list(checked.version.columns),
        "configs": {config.role: config.source for config in checked.configs},
        "findings": [finding.to_json() for finding in checked.findings],
        "left_out": [asdict(one) for one in checked.left_out],
        "memory": [asdict(plan) for plan in checked.memory],
    }
