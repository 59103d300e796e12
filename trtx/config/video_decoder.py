"""PyAV, the package that decodes videos. It is an optional extra because its wheels contain code under the GPL
(docs/licences.md)."""

from __future__ import annotations

import importlib.util
from functools import cache
from importlib import metadata

PACKAGE = "av"
INSTALL = "pip install 'trtx[video]'"
NO_DECODER = f"videos are decoded by PyAV, which is not installed here; install it with {INSTALL}"


@cache
def decodes_videos() -> bool:
    """Returns whether PyAV is installed in this Python environment, without importing it."""
    try:
        metadata.version(PACKAGE)
        return importlib.util.find_spec(PACKAGE) is not None
    except ImportError:  # PackageNotFoundError is a subclass
        return False
