"""Options of the verbs that change the memory of a served topology."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trtx.errors import UsageError
from trtx.launch import ServedMemory

TAGS = ("kv_cache", "model_weights")

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run directory of the trtx serve that runs, or its plan.json.")
]
WorkerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--worker", metavar="NAME", help="A worker, such as agg-0. Repeatable. Default: all.", show_default=False
    ),
]
DrainOption = Annotated[
    float,
    typer.Option("--drain-seconds", help="Time for open requests and unread handoffs to end.", min=0.0, max=3600.0),
]
EXIT_CODES = "Exit codes: 0 done; 2 usage, or a worker refuses; 4 a worker does not answer."


def controls(run: Path, workers: list[str] | None, drain_seconds: float) -> ServedMemory:
    """The controls of a run's workers, which print a line for each change. Raises UsageError."""
    from trtx.export.monitoring.scrape import read_plan

    return ServedMemory.of(read_plan(run), workers or (), drain_s=drain_seconds, tell=typer.echo)


def chosen_tags(given: str | None) -> list[str] | None:
    """Splits ``--tags``. Raises UsageError for an unknown tag."""
    if given is None:
        return None
    tags = [tag.strip() for tag in given.split(",")]
    if unknown := [tag for tag in tags if tag not in TAGS]:
        raise UsageError(f"--tags {given}: {unknown[0]!r} is no memory of a worker; expected {' or '.join(TAGS)}")
    return tags
