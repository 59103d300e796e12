"""Says why a model answers no requests while its workers sleep: see ``trtx.worker.sleeping``."""

from __future__ import annotations

import json
from pathlib import Path


def why_unavailable(run_dir: Path) -> str | None:
    """A sentence on how to wake the model if a worker of this run sleeps; None otherwise.

    It has the run directory's name but not its path, because clients see it.
    """
    if not any(_state(path) == "asleep" for path in (run_dir / "serve" / "status").glob("*.json")):
        return None
    return (
        "the model sleeps or is getting new weights, so it answers no requests now; if it sleeps, run trtx wake with "
        f"the run directory {run_dir.name}"
    )


def _state(status_file: Path) -> object:
    try:
        return json.loads(status_file.read_bytes()).get("state")
    except (OSError, ValueError, AttributeError):
        return None  # the worker is gone, or its file is not this trtx's
