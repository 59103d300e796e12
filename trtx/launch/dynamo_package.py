"""Checks that Dynamo's Python package is installed, which `pip install trtx` leaves out (docs/upstream/dynamo.md)."""

from __future__ import annotations

import importlib.metadata

from trtx.errors import UsageError


def require_dynamo() -> None:
    """Raises UsageError if ai-dynamo is not installed."""
    try:
        importlib.metadata.version("ai-dynamo")
    except importlib.metadata.PackageNotFoundError:
        runtime = importlib.metadata.version("ai-dynamo-runtime")
        raise UsageError(
            "trtx serves with NVIDIA Dynamo, and its package ai-dynamo is not installed; "
            f"install it with: pip install --no-deps ai-dynamo=={runtime}"
        ) from None
