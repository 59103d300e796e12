"""Exports a topology as one Slurm batch file: allocation, etcd and NATS, a step for each process, benchmark, shutdown.

Owns the placement of workers on the nodes of a job, the translation of a plan for unknown nodes, and the file's text;
docs/slurm.md has the reasons. Does not talk to Slurm: the user submits the file with ``sbatch``.
Enter through :func:`export`.
Invariants: the file contains no unfilled template and no secret, every word of the plan in it is quoted, and each
variable of the plan has an explicit rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trtx.export.slurm.script import export
    from trtx.export.slurm.spec import JobSpec

_HOMES = {"JobSpec": "spec", "export": "script"}
__all__ = ["JobSpec", "export"]


def __getattr__(name: str) -> object:
    """Imports a public name on first access, because the verb's help page needs none of them."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
