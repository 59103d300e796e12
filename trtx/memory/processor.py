"""Which numbers the processor of this machine multiplies: what the torch engine computes in where it has no GPU."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

BFLOAT16_FLAGS = ("avx512_bf16", "amx_bf16")
"""Of ``/proc/cpuinfo``. Without either, torch multiplies bfloat16 in software: products of 256 rows take 7 times as
long as float32's (docs/performance-notes.md)."""
_CPU_INFO = Path("/proc/cpuinfo")


def has_bfloat16(cpu_info: str) -> bool:
    """Whether the processor that ``/proc/cpuinfo`` describes multiplies bfloat16 in one instruction."""
    lines = (line.partition(":") for line in cpu_info.splitlines())
    flags = next((value.split() for name, _, value in lines if name.strip() == "flags"), [])
    return any(flag in flags for flag in BFLOAT16_FLAGS)


@lru_cache(maxsize=1)
def multiplies_bfloat16() -> bool:
    """Whether this machine's processor does; False where the system does not say."""
    try:
        return has_bfloat16(_CPU_INFO.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return False


def cpu_dtype(own: str) -> str:
    """In which dtype a checkpoint of dtype ``own`` is computed on this machine's processor, where nothing is asked for.

    float16 is not multiplied by most processors, and float32 holds each of its values.
    """
    return own if own == "bfloat16" and multiplies_bfloat16() else "float32"


def cpu_dtype_reason(own: str) -> str:
    """Why ``own`` became :func:`cpu_dtype`, as the end of a sentence."""
    flags = " or ".join(BFLOAT16_FLAGS)
    if own != "bfloat16":
        return f"the checkpoint is {own}, and there is no GPU"
    if multiplies_bfloat16():
        return f"the checkpoint is bfloat16, which this processor multiplies ({flags})"
    return f"the checkpoint is bfloat16, and this processor lacks {flags}: bfloat16 would take longer"
