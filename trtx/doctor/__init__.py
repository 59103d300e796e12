"""Finds the problems of this machine that would break or slow down serving, and their fixes.

Owns the checks of ``trtx doctor``: it gathers facts (``gather``), and pure functions judge them (``judge``).
Does not start, stop, change or delete anything, and does not print (``cli`` does).
Enter through :func:`examine` with a :class:`IntendedUse`. :func:`gather_gpus` and :func:`gather_software` return only
facts, for the record of a run; :func:`open_gpus` reads GPUs during a measurement.
Invariants: torch is never imported, and every warning and failure names its fix.
"""

from trtx.doctor.check import Check
from trtx.doctor.examination import IntendedUse, WantedHosts, examine
from trtx.doctor.facts import GpuProcess, GpuState, Package
from trtx.doctor.gather import gather_gpus, gather_software, open_gpus

__all__ = [
    "Check",
    "GpuProcess",
    "GpuState",
    "IntendedUse",
    "Package",
    "WantedHosts",
    "examine",
    "gather_gpus",
    "gather_software",
    "open_gpus",
]
