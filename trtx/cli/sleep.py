"""``trtx sleep``: gives back the memory of a served topology."""

from __future__ import annotations

from typing import Annotated

import typer

from trtx.cli import memory_options as options
from trtx.cli.command import Verb

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(cls=Verb, no_args_is_help=True, epilog=options.EXIT_CODES)
def sleep(
    run: options.RunArgument,
    *,
    tags: Annotated[
        str,
        typer.Option("--tags", metavar="TAGS", help="What to give back: kv_cache, model_weights, or both."),
    ] = ",".join(options.TAGS),
    worker: options.WorkerOption = None,
    drain_seconds: options.DrainOption = 30.0,
) -> None:
    """Give back the GPU memory of a topology that trtx serve runs.

    The workers leave routing, end their open requests, and keep their processes and
    CUDA graphs. Needs sleep_config.

    \b
    Examples:
      trtx sleep runs/20261128T005654Z-serve-agg-3e94032b
      trtx sleep runs/20261128T005654Z-serve-agg-3e94032b --tags kv_cache
    """
    options.change("sleep", run, worker, drain_seconds=drain_seconds, tags=tags)
