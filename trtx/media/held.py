"""How much of what was fetched is in memory, over all requests of a worker."""

from __future__ import annotations

import weakref

from trtx.media.blob import Blob
from trtx.media.errors import MediaError, too_large


class HeldMedia:
    """Files count for as long as anybody has their :class:`~trtx.media.blob.Blob`: whoever lets go of it need not say
    so. One event loop; blobs may be let go of in any thread."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._blobs: weakref.WeakSet[Blob] = weakref.WeakSet()

    @property
    def bytes(self) -> int:
        return sum(len(blob.data) for blob in self._blobs)

    def check(self, more_bytes: int = 1) -> None:
        """Raises MediaError 429 where no ``more_bytes`` can be held."""
        if self.bytes + more_bytes > self._limit_bytes:
            raise MediaError(
                429, f"media of {self._limit_bytes} bytes are being worked on already, the most that may; try again"
            )

    def hold(self, blob: Blob) -> Blob:
        """Raises MediaError: 429, and 413 for what could not be held alone."""
        if len(blob.data) > self._limit_bytes:
            raise too_large(blob.label, self._limit_bytes)
        self.check(len(blob.data))
        self._blobs.add(blob)
        return blob
