"""Errors about a media item, as shown to the client."""

from __future__ import annotations

from typing import Literal

Status = Literal[400, 403, 404, 408, 413, 415, 422, 424, 429]
"""HTTP status of a refusal; docs/multimodal.md, "What bad input gets", has one row for each.

All are 4xx: Dynamo 1.6.1 passes on an exception's ``status`` from 400 to 499 and turns anything else into a 500.
"""


THIS_PICTURE = "[this picture]"
"""Placeholder label of a file that several requests share; each client's error gets that client's label instead."""


class MediaError(Exception):
    """A fault of one media item. ``str()`` is one sentence of limited length, without any of the item's content."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status

    def about(self, label: str) -> MediaError:
        """A copy of this error with ``label`` in place of THIS_PICTURE."""
        return MediaError(self.status, str(self).replace(THIS_PICTURE, label))


class Stopping(MediaError):
    """The process that was to decode the item is stopping.

    The item is not at fault, so another worker may decode it.
    """


def too_large(label: str, max_bytes: int) -> MediaError:
    return MediaError(413, f"{label} is larger than {max_bytes} bytes, the limit for one media item")
