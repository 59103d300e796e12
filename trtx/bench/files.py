"""Writing a whole file or none."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Replaces ``path`` at once: a reader sees the old text or the new, never a part. A failure leaves nothing new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
