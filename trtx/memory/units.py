"""Bytes, for arithmetic and for people."""

from __future__ import annotations

MIB, GIB = 1 << 20, 1 << 30


def size_text(count: float) -> str:
    """``15.26 GiB``, and below one GiB ``268 MiB``."""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"
