"""``trtx wake``: wakes a topology that sleeps."""

from __future__ import annotations

from typing import Annotated

import typer

from trtx.cli import memory_options as options
from trtx.cli.command import Verb

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(cls=Verb, no_args_is_help=True, epilog=options.EXIT_CODES)
def wake(
    run: options.RunArgument,
    *,
    tags: Annotated[
        str | None,
        typer.Option(
            "--tags",
            metavar="TAGS",
            help="What to take again: kv_cache or model_weights. Default: all that was given back.",
            show_default=False,
        ),
    ] = None,
    worker: options.WorkerOption = None,
) -> None:
    """Wake a topology: its workers take their memory again and join routing.

    The KV cache is empty then, and the weights are what they were. A worker joins
    routing once it has all of its memory.

    \b
    Examples:
      trtx wake runs/20261128T005654Z-serve-agg-3e94032b
    """
    options.change("wake", run, worker, tags=tags)
