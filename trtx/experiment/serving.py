"""Serves a topology, with its start and end recorded in the run's journal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trtx.bench import Journal
from trtx.bench.journal import ProcessRestart, TopologyReady, TopologyStopping
from trtx.launch import Event, Interruption, ServedTopology, serve
from trtx.topology import Plan


@contextmanager
def serve_noted(
    label: str, plan: Plan, journal: Journal, on_event: Callable[[str, Event], None], interruption: Interruption
) -> Iterator[ServedTopology]:
    """Serves ``plan`` while inside. The journal gets the restarts even if an exception is raised."""
    with serve(plan, on_event=lambda event: on_event(label, event), interruption=interruption) as served:
        loaded, warmed_up = round(served.load_seconds, 3), round(served.warm_up_seconds, 3)
        journal.note(TopologyReady(topology=label, load_seconds=loaded, warm_up_seconds=warmed_up))
        try:
            yield served
        finally:
            restarts = tuple(ProcessRestart(name=one.name, at=one.at, exit=one.exit) for one in served.restarts)
            journal.note(TopologyStopping(topology=label, restarts=restarts))
