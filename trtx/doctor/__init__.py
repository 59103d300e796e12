"""Looks at this machine and says what would break or slow down serving, and how to put it right.

Owns the checks of ``trtx doctor``: facts are gathered (``gather``), then judged by pure functions (``judge``).
Does not start, stop, change or delete anything, and does not print (``cli`` does).
Enter through :func:`examine` with a :class:`Wanted`; :func:`gather_gpus` and :func:`gather_software` give the facts
alone, to the record of a run, and :func:`open_gpus` reads GPUs while they are measured.
Always holds: no torch is imported, and every row that is not fine names its fix.
"""

from trtx.doctor.check import Check
from trtx.doctor.examination import Wanted, WantedHosts, examine
from trtx.doctor.facts import GpuProcess, GpuState, Package
from trtx.doctor.gather import gather_gpus, gather_software, open_gpus

__all__ = [
    "Check",
    "GpuProcess",
    "GpuState",
    "Package",
    "Wanted",
    "WantedHosts",
    "examine",
    "gather_gpus",
    "gather_software",
    "open_gpus",
]
