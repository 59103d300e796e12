"""Where a run keeps what it leaves: ``<parent>/<utc>-<name>-<hash8>``, always a new one."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from pathlib import Path


def new_run_directory(parent: Path, name: str) -> Path:
    """A path that does not exist yet. Creates nothing: a dry run leaves nothing behind."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return parent.absolute() / f"{stamp}-{name}-{secrets.token_hex(4)}"
