"""The one room that starts, watches and stops processes.

Owns the children of a topology, the ports held for them, their discovery records and scratch files, and the signals.
Does not decide what to start (``topology`` does) and does not measure (``bench`` does).
Enter through :func:`prepare`, then :func:`serve`.
Always holds: when ``serve`` is left, by whatever way, no process of the topology lives and its scratch files are gone;
what is told as a cause was looked at, and no failed write or listener ends the watch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trtx.launch.events import Event
    from trtx.launch.preparation import prepare
    from trtx.launch.served import Restart, ServedTopology, serve

__all__ = ["Event", "Restart", "ServedTopology", "prepare", "serve"]

_HOMES = {
    "Event": "events",
    "Restart": "served",
    "ServedTopology": "served",
    "prepare": "preparation",
    "serve": "served",
}


def __getattr__(name: str) -> object:
    """Loads a name when it is first asked for: the guardian imports this package too, and stays a few MB small."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
