"""Checks which addresses accept a connection, before a process starts that depends on them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

_CONNECTS_WITHIN_S = 0.5


def reachable(urls: Sequence[str]) -> tuple[str, ...]:
    """The ``urls`` that accept a connection, in their order. Takes at most half a second in total."""
    with ThreadPoolExecutor(max_workers=max(1, len(urls))) as pool:
        return tuple(url for url, answers in zip(urls, pool.map(_answers, urls), strict=True) if answers)


def _answers(url: str) -> bool:
    address = urlsplit(url)
    try:
        with socket.create_connection((address.hostname, address.port), timeout=_CONNECTS_WITHIN_S):
            return True
    except OSError:
        return False
