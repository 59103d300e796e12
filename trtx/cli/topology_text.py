"""Formats a plan for ``--dry-run``: processes, settings and reasons, in 80 columns unless a word is longer."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

from trtx.cli.findings_text import describe_findings
from trtx.cli.hosts_text import describe_hosts, describe_ports
from trtx.cli.memory_text import describe_memory
from trtx.cli.sentences import fill
from trtx.topology import Plan, ProcessSpec, cpu_ranges

_WIDTH = 80


def describe_plan(plan: Plan) -> str:
    """Formats roles, GPUs, ports, command lines, environment additions, resolved configs and reasons."""
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    yield "Dry run: nothing was started."
    yield ""
    yield f"Mode       {plan.mode}, engine {plan.engine}"
    yield f"Model      {plan.model}"
    yield f"           {plan.model_path}"
    for index, url in enumerate(plan.urls or (plan.url,)):
        yield f"{'URL' if not index else '':11}{url}"
    yield f"GPUs       {_gpus(plan)}"
    yield f"Run        {plan.run_dir}"
    yield ""
    if plan.hosts:
        yield from describe_hosts(plan)
    shared = dict(set.intersection(*(set(process.env.items()) for process in plan.processes)))
    yield "Environment of every process:"
    yield from describe_environment(shared)
    for process in plan.processes:
        yield ""
        yield f"{process.name}: {_place(process)}, log {process.log_path.relative_to(plan.run_dir)}"
        yield from describe_environment({name: value for name, value in process.env.items() if name not in shared})
        yield from describe_command(process.argv)
    yield from describe_engine_configs(plan.engine_configs)
    if plan.memory:
        yield ""
        yield from describe_memory(plan.memory)
    if plan.findings:
        yield ""
        yield "Engine configs, worth knowing:"
        yield from describe_findings(plan.findings)
    if plan.all_warnings:
        yield ""
        yield "Warnings:"
        for warning in plan.all_warnings:
            yield from fill(f"  - {warning}", _WIDTH)
    yield from describe_reasons(plan.reasons)


def _gpus(plan: Plan) -> str:
    if plan.hosts and plan.gpu_names:
        return f"{len(plan.gpu_names)}, which each host looks at when it starts"
    return ", ".join(plan.gpu_names) if plan.gpu_names else "none"


def _place(process: ProcessSpec) -> str:
    place = f"GPU {','.join(map(str, process.gpu_indices))}" if process.gpu_indices else "no GPU"
    place += f", CPUs {cpu_ranges(process.cpus)}" if process.cpus else ""
    if process.host:
        return f"on {process.host}, {place}, {describe_ports(process)}"
    return place if process.system_port is None else f"{place}, metrics port {process.system_port}"


def describe_engine_configs(configs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for role, values in configs.items():
        yield ""
        yield f"Engine config of {role}:"
        text = yaml.safe_dump(dict(values), sort_keys=False) if values else "(the engine's defaults)"
        yield from textwrap.indent(text.rstrip(), "  ").splitlines()


def describe_reasons(reasons: Iterable[str]) -> Iterator[str]:
    yield ""
    yield "Decided:"
    for reason in reasons:
        yield from fill(f"  - {reason}", _WIDTH)


def describe_environment(variables: Mapping[str, str]) -> Iterator[str]:
    for name, value in sorted(variables.items()):
        yield f"  {name}={shlex.quote(value)}"


def describe_command(argv: tuple[str, ...]) -> Iterator[str]:
    """Yields the lines of a shell command with line continuations; a flag and its value stay on one line."""
    pieces: list[str] = []
    for word in map(shlex.quote, argv):
        if pieces and not word.startswith("-") and pieces[-1].startswith("-") and " " not in pieces[-1]:
            pieces[-1] += f" {word}"
        else:
            pieces.append(word)
    line = "  $"
    for piece in pieces:
        if len(line) + len(piece) + 3 > _WIDTH and line.strip() != "$":
            yield f"{line} \\"
            line = "     "
        line += f" {piece}"
    yield line
