"""``trtx doctor``: finds problems of this machine that would break or slow down serving, and how to fix them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trtx.cli.command import Verb
from trtx.cli.placement import refuse_ignored
from trtx.cli.sentences import fill
from trtx.errors import LaunchError

if TYPE_CHECKING:
    from trtx.doctor import Check

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

SCHEMA_VERSION = 1
_MARKS = {
    "ok": ("✓ ok", "green"),
    "absent": ("– n/a", None),
    "warning": ("! warning", "yellow"),
    "failed": ("✗ failed", "red"),
}
_STATUS_WIDTH, _NAME_WIDTH = 11, 20


@app.command(
    cls=Verb,
    no_args_is_help=False,
    epilog="Exit codes: 0 no check failed, warnings or not; 2 usage; 4 a check failed.",
)
def doctor(
    context: typer.Context,
    engine: Annotated[
        Literal["auto", "torch", "tensorrt-llm"],
        typer.Option("--engine", help="Engine to check for. auto: the engine that trtx serve would choose."),
    ] = "auto",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="HTTP port that must be free.")] = 8000,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Directory of run directories, as for serve and bench.")
    ] = Path("runs"),
    hosts: Annotated[
        Path | None,
        typer.Option(
            "--hosts",
            metavar="FILE",
            help="Also check a topology over the hosts in this YAML file. Run it on all of them at the same time.",
        ),
    ] = None,
    this_host: Annotated[
        str | None,
        typer.Option(
            "--this-host",
            metavar="NAME",
            help="Name of this host in the file. Default: the host with an address of this machine.",
        ),
    ] = None,
    wait: Annotated[
        float, typer.Option("--wait", min=0, max=600, help="Seconds to wait for the doctors of the other hosts.")
    ] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as one JSON document on stdout.")] = False,
) -> None:
    """Check this machine: driver, GPUs, packages, limits, leftovers.

    Changes nothing. Every row that is not fine names its fix.

    \b
    Examples:
      trtx doctor
      trtx doctor --engine tensorrt-llm --port 8001
      trtx doctor --json
      trtx doctor --hosts hosts.yaml --wait 60
    """
    refuse_ignored(context, () if hosts is not None else ("no hosts",))
    from trtx.doctor import IntendedUse, WantedHosts, examine

    wanted = IntendedUse(engine, port, output)
    if hosts is not None:
        from trtx.config.hosts import read_hosts

        wanted = replace(wanted, hosts=WantedHosts(read_hosts(hosts), this_host, wait))
    checks = examine(wanted)
    broken = [check for check in checks if check.status == "failed"]
    warnings = [check for check in checks if check.status == "warning"]
    if as_json:
        rows = [asdict(check) for check in checks]
        typer.echo(
            json.dumps(
                {"schema_version": SCHEMA_VERSION, "failed": len(broken), "warnings": len(warnings), "checks": rows},
                indent=2,
                ensure_ascii=False,
            )
        )
    else:
        for line in table(checks, shutil.get_terminal_size().columns):
            typer.echo(line)
        typer.echo(f"\n{len(checks)} checks: {len(broken)} failed, {len(warnings)} warnings")
    if broken:
        raise LaunchError(
            f"{len(broken)} of {len(checks)} checks failed ({', '.join(check.name for check in broken)}); "
            "each has its fix next to it"
        )


def table(checks: Sequence[Check], width: int) -> Iterator[str]:
    """Yields the table's lines, of at most ``width`` characters (at least 60) unless a single word is longer."""
    indent = " " * (_STATUS_WIDTH + _NAME_WIDTH)
    left = max(60, width) - len(indent)
    for check in checks:
        mark, color = _MARKS[check.status]
        needs_fix = check.status in ("warning", "failed")
        seen = check.seen + (f" (expected: {check.expected})" if needs_fix and check.expected else "")
        first, *rest = fill(seen, left, indent="")
        yield f"{typer.style(mark.ljust(_STATUS_WIDTH), fg=color)}{check.name:<{_NAME_WIDTH}}{first}"
        yield from (indent + line for line in rest)
        if needs_fix:
            for number, line in enumerate(fill(check.fix, left - 2, indent="")):
                yield indent + ("  " if number else "→ ") + line
