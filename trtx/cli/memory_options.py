"""Options of the verbs that change the memory of a served topology."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

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


def change(
    verb: Literal["sleep", "wake", "update"],
    run: Path,
    workers: list[str] | None,
    *,
    drain_seconds: float = 0.0,
    tags: str | None = None,
    model: str = "",
) -> None:
    """Changes the memory of a run's workers, and prints a line for each. Raises UsageError and LaunchError."""
    from trtx.checkpoint import resolve_checkpoint
    from trtx.export.monitoring.scrape import read_plan

    chosen = None if tags is None else _tags(tags)
    plan = read_plan(run)
    controls = ServedMemory.of(plan, workers or (), drain_s=drain_seconds, tell=typer.echo)
    if verb == "sleep":
        controls.sleep(chosen or TAGS)
    elif verb == "wake":
        controls.wake(chosen)
    else:
        controls.update_weights(resolve_checkpoint(model).path.resolve())
    if verb != "sleep":
        controls.await_answer(plan)


def _tags(given: str) -> list[str]:
    tags = [tag.strip() for tag in given.split(",")]
    if unknown := [tag for tag in tags if tag not in TAGS]:
        raise UsageError(
            f"--tags {given}: {unknown[0]!r} is not memory that a worker can release; expected {' or '.join(TAGS)}"
        )
    return tags
