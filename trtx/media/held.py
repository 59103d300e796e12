"""Limits the memory of fetched media over all requests of a worker."""

from __future__ import annotations

import weakref

from trtx.media.blob import Blob
from trtx.media.errors import MediaError, too_large


class HeldMedia:
    """Counts the bytes of all live :class:`~trtx.media.blob.Blob` objects.

    A blob stops counting when it is garbage-collected, so users need not release it. For one event loop; blobs may be
    freed in any thread.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._blobs: weakref.WeakSet[Blob] = weakref.WeakSet()

    @property
    def bytes(self) -> int:
        return sum(len(blob.data) for blob in self._blobs)

    def check(self, more_bytes: int = 1) -> None:
        """Raises MediaError 429 if ``more_bytes`` would exceed the limit."""
        if self.bytes + more_bytes > self._limit_bytes:
            raise MediaError(
                429, f"media of {self._limit_bytes} bytes are already being processed, which is the limit; try again"
            )

    def hold(self, blob: Blob) -> Blob:
        """Counts ``blob`` and returns it. Raises MediaError: 429, or 413 if the blob alone exceeds the limit."""
        if len(blob.data) > self._limit_bytes:
            raise too_large(blob.label, self._limit_bytes)
        self.check(len(blob.data))
        self._blobs.add(blob)
        return blob
