"""A medium's bytes, and what logs and errors call it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

LABEL_CHARACTERS = 120
Kind = Literal["image", "video", "embedding"]
"""An embedding is an image's, that a client made itself."""

_MEDIA_TYPE = re.compile(r"data:([\w.+-]{1,32}/[\w.+-]{1,32})?[;,]", re.ASCII)
_LOOKED_AT = 2048  # of a URL's beginning


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Blob:
    """``label``: see :func:`label_of`. Two are never equal: their keys may be (``keys.py``)."""

    data: bytes = field(repr=False)
    label: str
    kind: Kind = "image"  # what it was sent as; its content may be another thing


def label_of(url: str) -> str:
    """At most ``LABEL_CHARACTERS`` printable ASCII characters that tell a URL from others.

    Without the query, which may hold a signature, without user and password, and without the content of ``data:``.
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
    except ValueError:  # brackets that are no IPv6 address, or characters that turn into / or @
        text = beginning.partition("?")[0].rpartition("@")[2]
    shown = "".join(one if one.isascii() and one.isprintable() else "?" for one in text[: LABEL_CHARACTERS + 1])
    if not shown:
        return "an empty URL"
    return shown if len(shown) <= LABEL_CHARACTERS else shown[: LABEL_CHARACTERS - 3] + "..."
