"""The live view of a topology: a table that is redrawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Protocol

import psutil
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trtx.cli.console import ProgressConsole
from trtx.cli.sentences import wrapped
from trtx.launch import Event, Slot
from trtx.topology import Plan

_STYLES = {"up": "green", "starting": "yellow", "loading": "yellow", "draining": "cyan", "restarting": "red"}


class View(Protocol):
    """Shows events, process states and messages."""

    def on_event(self, event: Event) -> None: ...
    def on_slots(self, slots: tuple[Slot, ...]) -> None: ...
    def show(self, text: str) -> None: ...


@contextlib.contextmanager
def open_view(plan: Plan) -> Iterator[View]:
    """Opens a table view if stdout is a terminal that can move its cursor, else a line view."""
    console = ProgressConsole(soft_wrap=True)
    if not console.can_redraw:
        yield LineView(console)
        return
    view = TableView(plan, console)
    with view.live:
        yield view


class LineView:
    """Prints one line per event, with the time, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def on_event(self, event: Event) -> None:
        self.show(_event_line(event))

    def on_slots(self, slots: tuple[Slot, ...]) -> None:
        """Does nothing: lines are printed only for events."""

    def show(self, text: str) -> None:
        self._console.print(text)


class TableView:
    """Prints events above a table that is redrawn in place."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self._plan = plan
        self._slots: tuple[Slot, ...] = ()
        self._console = console
        self.live = Live(console=console, get_renderable=self._render, refresh_per_second=2, redirect_stderr=False)

    def on_event(self, event: Event) -> None:
        if event.kind not in ("starting", "up"):  # the table shows these
            self._console.print(wrapped(_event_line(event), sys.stdout))

    def on_slots(self, slots: tuple[Slot, ...]) -> None:
        self._slots = slots

    def show(self, text: str) -> None:
        self._console.print(text)

    def _render(self) -> Group:
        plan = self._plan
        title = Text(f"{plan.model}  {plan.mode}  engine {plan.engine}  {plan.url}", style="bold")
        return Group(title, render_table(self._slots, time.monotonic()))


def render_table(slots: tuple[Slot, ...], now: float) -> Table:
    """Returns a table with one row per process.

    The memory column shows GPU memory if the worker uses some, else the resident memory of its processes.
    """
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading, justify in (("process", "left"), ("GPU", "left"), ("state", "left"), ("pid", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    table.add_column("memory", justify="right")
    table.add_column("KV blocks", justify="right")
    hands_over = any(slot.spec.role == "decode" for slot in slots)
    if hands_over:
        table.add_column("handoffs", justify="right")
    for slot in slots:
        pid = slot.child.pid if slot.child is not None else None
        kv_blocks = str(slot.status.kv_blocks) if slot.status is not None and slot.status.kv_blocks else "-"
        table.add_row(
            slot.spec.name,
            ",".join(map(str, slot.spec.gpu_indices)) or "-",
            Text(_state(slot, now), style=_STYLES.get(slot.state, "")),
            str(pid or "-"),
            _memory(slot, pid),
            kv_blocks,
            *([_handoffs(slot)] if hands_over else []),
        )
    return table


def _handoffs(slot: Slot) -> Text:
    """Formats a decode worker's number of KV handoffs and of prompts that it computed itself.

    Prompts that it had to recompute are red; the others were left to it by the router.
    """
    found = None if slot.status is None else slot.status.handoffs
    if found is None:
        return Text("-")
    counts = [str(found.read), *([f"{found.local} local"] if found.local else [])]
    if not found.recomputed:
        return Text(", ".join(counts))
    return Text(", ".join([*counts, f"{found.recomputed} recomputed"]), style="red")


def _state(slot: Slot, now: float) -> str:
    if slot.state == "restarting" and slot.restart_at is not None:
        return f"restarting in {max(0.0, slot.restart_at - now):.0f} s"
    return slot.state


def _memory(slot: Slot, pid: int | None) -> str:
    used = (slot.status.device_memory_bytes if slot.status is not None else None) or 0
    if not used and pid is not None:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            used = sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
    return f"{used / 2**30:.1f} GiB" if used >= 2**30 else f"{used / 2**20:.0f} MiB" if used else "-"


def _event_line(event: Event) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(event.at))} {event.message}"
