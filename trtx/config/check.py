"""Checks the engine configs of one topology before any process starts: schema, rules, and the files' headers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from trtx.config import schema
from trtx.config.engine_config import ResolvedEngineConfig, given_path
from trtx.config.engine_uses import OWN_FIELDS
from trtx.config.findings import SEVERITIES, Finding, Severity
from trtx.config.left_out import OF_TP
from trtx.config.rules import ModelFacts, Subject, findings_of
from trtx.config.topology import Role
from trtx.config.torch_fields import refused_fields
from trtx.config.torch_limits import outside_limits
from trtx.config.versions import DEFAULT_VERSION, SchemaVersion, schema_version
from trtx.config.wording import shown


def checked_version(configs: Mapping[Role, ResolvedEngineConfig], stated: str | None) -> SchemaVersion:
    """Returns the TensorRT-LLM version to check the configs against.

    This is ``stated`` (the version that the user requested or that is installed) if it is given, else the newest
    version in the headers of the configs, else trtx's default.
    """
    if stated is not None:
        return schema_version(stated)
    written = [schema_version(config.header.tensorrt_llm) for config in configs.values() if config.header]
    return max(written, key=lambda version: version.key, default=schema_version(DEFAULT_VERSION))


def check_engine_configs(
    configs: Mapping[Role, ResolvedEngineConfig],
    *,
    engine: str = "tensorrt-llm",
    version: str | None = None,
    model: ModelFacts | None = None,
    gpus: tuple[str, ...] = (),
) -> tuple[Finding, ...]:
    """Returns the findings from the schema, the rules and the headers, with errors first.

    ``gpus``: the names of this machine's GPUs; if it is empty, the checks use the GPUs that the headers name. A
    requirement that only TensorRT-LLM has becomes a note on the torch engine, and is dropped for the engines that
    compute no model.
    """
    at = checked_version(configs, version)
    found: list[Finding] = []
    subjects: dict[Role, Subject] = {}
    for role, config in configs.items():
        own = OWN_FIELDS.get(engine, frozenset())
        certain, doubtful = schema.findings_for({k: v for k, v in config.values.items() if k not in own}, at)
        found += _schema_findings(config, certain, doubtful, at, engine)
        values = _without(config.values, [item.path for item in certain if item.kind in _UNUSABLE])
        values = _without(values, [item.path for item in doubtful if item.kind == "wrong-type"])
        subjects[role] = _subject(config, values, at, model, gpus)
    found += findings_of(subjects, engine=engine)
    if engine == "torch":
        wrong = {(finding.roles, finding.path) for finding in found if finding.severity == "error"}
        refused = [refused for config in configs.values() for refused in _torch_findings(config)]
        found += [finding for finding in refused if (finding.roles, finding.path) not in wrong]
    if engine == "tensorrt-llm":
        found += [note for role, config in configs.items() for note in _header_notes(config, subjects[role])]
    elif engine != "torch":
        found = [finding for finding in found if finding.severity == "error"]
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))


# Rules must not calculate with fields of these kinds: their type is wrong or unchecked.
_UNUSABLE: tuple[schema.Kind, ...] = ("wrong-type", "unknown-field", "other-version")


def _without(values: Mapping[str, Any], paths: list[str]) -> dict[str, Any]:
    kept: dict[str, Any] = copy.deepcopy(dict(values))
    for path in paths:
        *parents, leaf = path.split(".")
        node: Any = kept
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(leaf, None)
    return kept


def _subject(
    config: ResolvedEngineConfig,
    values: Mapping[str, Any],
    at: SchemaVersion,
    model: ModelFacts | None,
    gpus: tuple[str, ...],
) -> Subject:
    header = config.header
    if model is None and header is not None and header.architecture is not None:
        model = ModelFacts(header.architecture)
    return Subject(
        role=config.role,
        values=values,
        source=config.source,
        version=at,
        model=model,
        gpus=gpus or (header.gpu if header else ()),
        overridden=[path for path, source in config.overridden.items() if source != OF_TP],
    )


def _schema_findings(
    config: ResolvedEngineConfig,
    certain: list[schema.SchemaFinding],
    doubtful: list[schema.SchemaFinding],
    at: SchemaVersion,
    engine: str,
) -> Iterator[Finding]:
    for found in certain:
        bound = engine == "tensorrt-llm" or found.kind != "other-version"
        yield _finding(config, found, "error" if bound else "note", at)
    for found in doubtful:
        yield _finding(config, found, "warning" if engine == "tensorrt-llm" else "note", at)
    for name in sorted({"model", "tokenizer"} & config.values.keys()):
        yield Finding(
            severity="error",
            rule="one-model",
            roles=(config.role,),
            path=name,
            message=f"{name} is set ({config.role}, {_origin(config, name)})",
            reason="all workers of a topology serve one model, which --model names",
            evidence="trtx",
            fix="leave it out and give --model",
        )


_REASONS: dict[schema.Kind, str] = {
    "unknown-field": "TensorRT-LLM refuses every key that it does not know",
    "other-version": "names and values move between releases",
    "missing-field": "TensorRT-LLM does not build the section without it",
    "wrong-type": "TensorRT-LLM refuses values of another type",
    "wrong-value": "TensorRT-LLM refuses values outside of the range",
}


def _origin(config: ResolvedEngineConfig, path: str) -> str:
    """Returns where the field comes from: the file, ``--tp``, ``--set``, or ``--set`` with its text.

    The text is included if the assignment names an enclosing section or created this one.
    """
    given = given_path(config.overridden, path)
    if given is None:
        return config.source
    text = config.overridden[given]
    if text == OF_TP:
        return OF_TP
    key = text.partition("=")[0].removeprefix(f"{config.role}.")
    return "--set" if path == key else f"--set {shown(text)}"


def _finding(
    config: ResolvedEngineConfig, found: schema.SchemaFinding, severity: Severity, at: SchemaVersion
) -> Finding:
    return Finding(
        severity=severity,
        rule=found.kind,
        roles=(config.role,),
        path=found.path,
        message=f"{found.message} ({config.role}, {_origin(config, found.path)})",
        reason=_REASONS[found.kind],
        evidence=f"llm_args.json; TensorRT-LLM {at.how_sure}",
        fix=found.fix,
    )


# The topology room refuses these for the torch engine, in a sentence that names --tp, so the check here skips them.
_SIZES = ("pipeline_parallel_size", "context_parallel_size")


def _torch_findings(config: ResolvedEngineConfig) -> Iterator[Finding]:
    def finding(path: str, message: str, because: str, fix: str | None) -> Finding:
        message = f"{message} ({config.role}, {_origin(config, path)})"
        return Finding("error", "torch-engine", (config.role,), path, message, because, "trtx", fix)

    for refused in refused_fields(config.values):
        if refused.path not in _SIZES:
            yield finding(refused.path, refused.message, refused.refusal.because, refused.refusal.instead)
    for outside in outside_limits(config.values):
        because = "the torch engine can't run with it"
        yield finding(outside.path, str(outside), because, None)


def _header_notes(config: ResolvedEngineConfig, subject: Subject) -> Iterator[Finding]:
    header, at = config.header, subject.version
    if header is None:
        return
    differences = []
    if schema_version(header.tensorrt_llm).key != at.key:
        differences.append(f"for TensorRT-LLM {header.tensorrt_llm}, checked for {at.how_sure}")
    if header.gpus != subject.world_size:
        differences.append(f"for {header.gpus} GPUs a worker, resolved to {subject.world_size}")
    if not any(kind in gpu for kind in header.gpu for gpu in subject.gpus):
        differences.append(f"for {' or '.join(header.gpu)}, and this is {subject.gpus[0]}")
    for difference in differences:
        yield Finding(
            severity="note",
            rule="written-for",
            roles=(config.role,),
            path="",
            message=f"{config.source} is written {difference}",
            reason="it passes, but it was not tuned for that",
            evidence="the header of the file",
        )
