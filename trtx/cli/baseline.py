"""``trtx baseline``: lists, shows, saves, promotes and expires the baselines that runs are compared with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtx.cli.command import Verb
from trtx.cli.gate_options import BaselineDirOption
from trtx.cli.placement import refuse_ignored
from trtx.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from trtx.experiment.baselines.baseline import Baseline

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Action(Enum):
    LIST = "list"
    SHOW = "show"
    SAVE = "save"
    PROMOTE = "promote"
    EXPIRE = "expire"


# The arguments of each action.
_WORDS: dict[Action, tuple[str, ...]] = {
    Action.LIST: (),
    Action.SHOW: ("NAME",),
    Action.SAVE: ("RUN", "NAME"),
    Action.PROMOTE: ("NAME",),
    Action.EXPIRE: (),
}


@dataclass(frozen=True, slots=True)
class BaselineRequest:
    """The parsed command line of ``trtx baseline``."""

    action: Action
    words: tuple[str, ...]
    directory: Path
    older_than_days: int | None
    remove: bool


@app.command(
    cls=Verb,
    no_args_is_help=True,
    epilog="Exit codes: 0 done; 2 usage, or a candidate whose run did not pass.",
)
def baseline(
    context: typer.Context,
    action: Annotated[Action, typer.Argument(metavar="ACTION", help="list, show, save, promote or expire.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN] [NAME]", help="show NAME, save RUN NAME, promote NAME.", show_default=False),
    ] = None,
    *,
    baseline_dir: BaselineDirOption = None,
    older_than: Annotated[
        int | None,
        typer.Option(
            "--older-than",
            min=0,
            max=36500,
            metavar="DAYS",
            help="With expire: also baselines that are older than this, promoted or not.",
        ),
    ] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="With expire: remove the baselines. Without --remove they are only listed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With list and show: print JSON on stdout.")] = False,
) -> None:
    """List, show, save, promote and expire baselines.

    A baseline is saved as a candidate. Promoted, which takes a run that passed,
    it is the one that --baseline DIR picks for its machine, model and load; the
    one before it is superseded, and expires.

    \b
    Examples:
      trtx baseline list
      trtx baseline save runs/20261121T050132Z-bench-9a1c6852 main
      trtx baseline promote main
      trtx baseline expire --older-than 90 --remove
    """
    refuse_ignored(context, [action.value])
    given, taken = tuple(words or ()), _WORDS[action]
    if len(given) != len(taken):
        takes = f"{action.value} {' '.join(taken)}".strip()
        if len(given) > len(taken):
            raise UsageError(f"{given[len(taken)]!r} has no effect after trtx baseline {takes}; leave it out")
        raise UsageError(f"{action.value} lacks {' and '.join(taken[len(given) :])}; expected trtx baseline {takes}")
    request = BaselineRequest(action, given, baseline_dir or Path("baselines"), older_than, remove)
    found = answer(request)
    if as_json:
        typer.echo(json.dumps({"baselines": [_described(one) for one in found]}))
        return
    _show(request, found)


def answer(request: BaselineRequest) -> tuple[Baseline, ...]:
    """Performs the action and returns the baselines concerned."""
    from trtx.experiment.baselines.store import Baselines, located

    baselines = Baselines(request.directory)
    match request.action:
        case Action.LIST:
            return baselines.all()
        case Action.SHOW:
            return (baselines.get(request.words[0]),)
        case Action.SAVE:
            run, name = request.words
            baselines.save(located(run), name)
            return (baselines.get(name),)
        case Action.PROMOTE:
            promoted, superseded = baselines.promote(request.words[0])
            return (promoted, *(baselines.get(name) for name in superseded))
        case Action.EXPIRE:
            expired = baselines.expired(request.older_than_days)
            if request.remove:
                baselines.remove(expired)
            return expired


def _show(request: BaselineRequest, found: tuple[Baseline, ...]) -> None:
    from trtx.cli.console import ResultConsole
    from trtx.experiment.baselines.baseline import records_unchecked

    if not found:
        none = "nothing expires" if request.action is Action.EXPIRE else "no baseline"
        typer.echo(f"{none} in {request.directory}")
        return
    console = ResultConsole()
    console.print(_table(found))
    if request.action in (Action.SAVE, Action.SHOW):
        for sentence in records_unchecked(found[0]):
            console.print(f"\n{sentence}")
    if request.action is Action.SHOW:
        console.print(_conditions(found[0]))
    if request.action is Action.EXPIRE:
        typer.echo("removed" if request.remove else "nothing was removed; add --remove")


def _table(found: tuple[Baseline, ...]) -> Table:
    from trtx.report.whole_table import WholeTable

    table = WholeTable()
    for title in ("name", "state", "saved", "model", "machine", "cells", "trials"):
        table.add_column(title, overflow="fold")
    for one in found:
        trials = sorted({len(cell.trials) for cell in one.cells})
        table.add_row(
            one.name, one.state, f"{one.saved_at:%Y-%m-%d}", str(one.conditions.model["name"]), _machine(one),
            str(len(one.cells)), "–".join(map(str, dict.fromkeys((trials[0], trials[-1])))),
        )  # fmt: skip
    return table


def _conditions(one: Baseline) -> str:
    from dataclasses import asdict

    lines = [f"run: {one.run}", f"verdict of its run: {one.verdict.value if one.verdict else 'not judged'}"]
    lines += [f"cells: {', '.join(cell.name for cell in one.cells)}"]
    lines += [
        f"scores of {scored.topology}: "
        + ", ".join(
            f"{task.task} {task.metric} {task.value:.4g} ({len(task.samples)} samples)" for task in scored.tasks
        )
        for scored in one.scores
    ]
    lines += [f"{group}: {json.dumps(values, ensure_ascii=False)}" for group, values in asdict(one.conditions).items()]
    return "\n" + "\n".join(lines)


def _machine(one: Baseline) -> str:
    machine = one.conditions.machine
    return ", ".join(machine.get("gpus") or ()) or f"{machine['cpu']}, {machine['cpu_cores']} cores"


def _described(one: Baseline) -> dict[str, object]:
    from dataclasses import asdict

    return {
        "name": one.name,
        "state": one.state,
        "run": one.run,
        "saved_at": one.saved_at.isoformat(),
        "verdict": None if one.verdict is None else one.verdict.value,
        "records_unchecked": one.records_unchecked,
        "cells": [cell.name for cell in one.cells],
        "scores": {scored.topology: {task.task: task.value for task in scored.tasks} for scored in one.scores},
        "conditions": asdict(one.conditions),
    }
