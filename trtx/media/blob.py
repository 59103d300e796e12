"""The bytes of a media item, and its label in logs and errors."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

LABEL_CHARACTERS = 120
Kind = Literal["image", "video", "embedding"]
"""Kind of a media item. An embedding is that of an image, computed by the client."""

_MEDIA_TYPE = re.compile(r"data:([\w.+-]{1,32}/[\w.+-]{1,32})?[;,]", re.ASCII)
_LOOKED_AT = 2048  # only this prefix of a URL is examined


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Blob:
    """The bytes of a media item. ``label``: see :func:`label_of`.

    Blobs compare by identity; equal content has equal keys (``keys.py``).
    """

    data: bytes = field(repr=False)
    label: str
    kind: Kind = "image"  # the kind that the client declared; the content may differ


def label_of(url: str) -> str:
    """At most ``LABEL_CHARACTERS`` printable ASCII characters that identify a URL.

    Leaves out the query, which may contain a signature, user name and password, and the content of ``data:`` URLs.
    """
    beginning = url[:_LOOKED_AT]
    if beginning[:5].lower() == "data:":
        found = _MEDIA_TYPE.match(beginning[:5].lower() + beginning[5:])
        kind = f"data:{found[1]}" if found and found[1] else "data:"
        return f"{kind} URL of {len(url)} characters"
    try:
        parts = urlsplit(beginning)
        text = f"{parts.scheme}://" if parts.scheme else ""
        text += parts.netloc.rpartition("@")[2] + parts.path
    except ValueError:  # brackets without an IPv6 address, or characters that normalise to / or @
        text = beginning.partition("?")[0].rpartition("@")[2]
    shown = "".join(one if one.isascii() and one.isprintable() else "?" for one in text[: LABEL_CHARACTERS + 1])
    if not shown:
        return "an empty URL"
    return shown if len(shown) <= LABEL_CHARACTERS else shown[: LABEL_CHARACTERS - 3] + "..."
