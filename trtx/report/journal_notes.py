"""Notes on a run from its journal."""

from __future__ import annotations

from trtx.bench.journal import JournalEvent, RunFailed, RunResumed, TopologyStopping

_ENDED_EARLY = "The run ended early"


def notes_of(journal: tuple[JournalEvent, ...]) -> tuple[str, ...]:
    """Restarts during measurement, and an early end unless the run was resumed later."""
    notes: list[str] = []
    for event in journal:
        if isinstance(event, TopologyStopping) and event.restarts:
            deaths = ", ".join(f"{restart.name} ({restart.exit})" for restart in event.restarts)
            count = len(event.restarts)
            notes.append(
                f"{event.topology}: {count} restart{'s' if count > 1 else ''} while it was measured: {deaths}. "
                "Its metrics include them."
            )
        if isinstance(event, RunResumed):
            notes = [note for note in notes if not note.startswith(_ENDED_EARLY)]
        if isinstance(event, RunFailed):
            notes.append(f"{_ENDED_EARLY}: {event.error}")
    return tuple(notes)
