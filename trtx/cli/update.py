"""``trtx update``: replaces the weights of a served topology in place."""

from __future__ import annotations

from typing import Annotated

import typer

from trtx.cli import memory_options as options
from trtx.cli.command import Verb

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(cls=Verb, no_args_is_help=True, epilog=options.EXIT_CODES)
def update(
    run: options.RunArgument,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Checkpoint of the same config: a directory, or a name.")
    ],
    *,
    worker: options.WorkerOption = None,
    drain_seconds: options.DrainOption = 30.0,
) -> None:
    """Replace the weights of a topology that trtx serve runs, without a restart.

    The workers leave routing, end their open requests, read the new weights into the
    memory of the old ones, empty their KV cache, and come back. Needs sleep_config.

    \b
    Examples:
      trtx update runs/20261128T005654Z-serve-agg-3e94032b checkpoints/step-200
    """
    options.change("update", run, worker, drain_seconds=drain_seconds, model=model)
