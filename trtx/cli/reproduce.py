"""``trtx bench reproduce``: repeats a run from its run manifest, after it has listed what differs on this machine."""

from __future__ import annotations

import shutil
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtx.cli import topology_options as options
from trtx.cli.command import Verb
from trtx.cli.placement import refuse_ignored
from trtx.cli.run_options import DryRunOption, JsonOption
from trtx.config.wording import shown
from trtx.errors import UsageError

if TYPE_CHECKING:
    from trtx.experiment import Locked
    from trtx.runs.forms import Difference

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

NOTHING_DIFFERS = "nothing differs"
_NOT_THERE = "–"
_SHARES = (4, 3, 3)  # the relative widths of the columns what, then, here
_NARROWEST, _WIDEST = 60, 80


@app.command(
    cls=Verb,
    no_args_is_help=False,
    epilog="Exit codes: as trtx bench; also 2 if the run is impossible here or, with --exact, if something differs.",
)
def reproduce(
    context: typer.Context,
    *,
    lock: Annotated[
        Path, typer.Argument(metavar="LOCK", help="A run directory, or its run.lock.yaml, which may be a copy.")
    ],
    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help="Measure only if nothing differs; otherwise print the differences and exit with 2."
        ),
    ] = False,
    output: options.OutputOption = Path("runs"),
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Repeat a run from its lock: print what differs on this machine, then measure.

    Only the lock is needed, so it may be a copy from another machine. It contains
    the modes, loads, seed, prompts and engine configs.

    \b
    Examples:
      trtx bench reproduce runs/20261121T050132Z-bench-9a1c6852/run.lock.yaml
      trtx bench reproduce run.lock.yaml --dry-run
      trtx bench reproduce run.lock.yaml --exact -o reproduced
    """
    refuse_ignored(context, ["dry run"] if dry_run else [])
    from trtx.experiment import read_locked, where_it_began

    output, lock = output.absolute(), lock.absolute()
    locked = read_locked(lock)
    with where_it_began(lock, is_copy=True):
        _reproduce(locked, lock, output, exact=exact, dry_run=dry_run, as_json=as_json)


def _reproduce(locked: Locked, lock: Path, output: Path, *, exact: bool, dry_run: bool, as_json: bool) -> None:
    from trtx.cli.bench import measure, show_plans
    from trtx.experiment import differences_here, spec_to_run

    found = differences_here(locked)
    for line in table(found, shutil.get_terminal_size().columns):
        typer.echo(line, err=as_json)
    if exact and found:
        raise UsageError(
            f"{len(found)} of the conditions of {shown(str(lock))} differ here (listed above), and --exact is given; "
            "correct them, or leave out --exact"
        )
    if dry_run:
        with tempfile.TemporaryDirectory(prefix="trtx-") as scratch:
            show_plans(spec_to_run(locked, Path(scratch)), output)
        return
    measure(spec_to_run(locked, output), output, dry_run=False, as_json=as_json)


def table(found: Sequence[Difference], width: int) -> Iterator[str]:
    """Yields the lines of a table with the columns what, then, here. Its width is ``width``, limited to 60 to 80."""
    if not found:
        yield NOTHING_DIFFERS
        return
    width = min(_WIDEST, max(_NARROWEST, width))
    widths = [width * share // sum(_SHARES) - 2 for share in _SHARES]
    rows = [("what", "then", "here"), *((one.name, one.before, one.now) for one in found)]
    for row in rows:
        cells = [
            textwrap.wrap(_NOT_THERE if text is None else text, limit, break_on_hyphens=False) or [""]
            for text, limit in zip(row, widths, strict=True)
        ]
        for parts in zip_longest(*cells, fillvalue=""):
            yield "  ".join(part.ljust(limit) for part, limit in zip(parts, widths, strict=True)).rstrip()
