"""What is wrong with a medium, as the client is told."""

from __future__ import annotations

from typing import Literal

Status = Literal[400, 403, 404, 408, 413, 415, 422, 424, 429]
"""docs/multimodal.md, "What bad input gets", has one row each. All are 4xx: Dynamo 1.4.2 passes ``status`` of an
exception on from 400 to 499 and makes a 500 of anything else."""


THIS_PICTURE = "[this picture]"
"""The label of a file that several requests share: each is told what is wrong with it under a label of its own."""


class MediaError(Exception):
    """The fault of one medium, nobody else's. ``str()``: one sentence, bounded, with nothing of the content."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status

    def about(self, label: str) -> MediaError:
        """An error of its own for whoever knows the file as ``label``, where this one is about THIS_PICTURE."""
        return MediaError(self.status, str(self).replace(THIS_PICTURE, label))


class Stopping(MediaError):
    """No fault of the medium: whoever was to decode it ends, and another may do it."""


def too_large(label: str, max_bytes: int) -> MediaError:
    return MediaError(413, f"{label} is larger than {max_bytes} bytes, the most that one medium may have")
