"""A topology as one batch file of Slurm: allocation, etcd and NATS, a step a process, a benchmark, an ordered end.

Owns where workers go on the nodes of a job, what of a plan holds there, and the file's text; docs/slurm.md has the
reasons. Does not talk to Slurm: the file is submitted by ``sbatch``.
Enter through :func:`export`.
Always holds: the file has no template left in it and no secret, every word of a plan in it is quoted, and each variable
of the plan has been decided about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trtx.export.slurm.script import export
    from trtx.export.slurm.spec import JobSpec

_HOMES = {"JobSpec": "spec", "export": "script"}
__all__ = ["JobSpec", "export"]


def __getattr__(name: str) -> object:
    """Loads a name when it is first asked for: help of the verb needs none of them."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
