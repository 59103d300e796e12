"""Units of memory, and their text form."""

from __future__ import annotations

MIB, GIB = 1 << 20, 1 << 30


def size_text(count: float) -> str:
    """Formats bytes as ``15.26 GiB``, or below one GiB as ``268 MiB``."""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"
