"""Selects the dtype that the torch engine computes in on a CPU, by the instructions of this machine's processor."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

BFLOAT16_FLAGS = ("avx512_bf16", "amx_bf16")
"""Flags in ``/proc/cpuinfo``. Without either of them torch multiplies bfloat16 in software: matmuls of 256 rows take 7
times as long as in float32 (docs/performance-notes.md)."""
_CPU_INFO = Path("/proc/cpuinfo")


def has_bfloat16(cpu_info: str) -> bool:
    """Returns whether the processor has an instruction for bfloat16 products. ``cpu_info``: ``/proc/cpuinfo``."""
    lines = (line.partition(":") for line in cpu_info.splitlines())
    flags = next((value.split() for name, _, value in lines if name.strip() == "flags"), [])
    return any(flag in flags for flag in BFLOAT16_FLAGS)


@lru_cache(maxsize=1)
def multiplies_bfloat16() -> bool:
    """Returns whether this machine's processor has such an instruction; False if the system does not report it."""
    try:
        return has_bfloat16(_CPU_INFO.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return False


def cpu_dtype(own: str) -> str:
    """Returns the default compute dtype on this machine's processor for a checkpoint of dtype ``own``.

    A float16 checkpoint is computed in float32: most processors can't multiply float16, and float32 represents every
    float16 value exactly.
    """
    return own if own == "bfloat16" and multiplies_bfloat16() else "float32"


def cpu_dtype_reason(own: str) -> str:
    """Returns the reason for the choice of :func:`cpu_dtype`, as the end of a sentence."""
    flags = " or ".join(BFLOAT16_FLAGS)
    if own != "bfloat16":
        return f"the checkpoint is {own}, and there is no GPU"
    if multiplies_bfloat16():
        return f"the checkpoint is bfloat16, which this processor multiplies ({flags})"
    return f"the checkpoint is bfloat16, and this processor lacks {flags}: bfloat16 would take longer"
