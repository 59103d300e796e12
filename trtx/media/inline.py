"""Decodes ``data:`` URLs (RFC 2397) in a thread and in pieces.

Python's decoders hold the GIL during a call, so even in a thread a single call would block the event loop: 23 MB took
173 ms.
"""

from __future__ import annotations

import asyncio
import binascii
import re
from collections.abc import Iterator

from trtx.config.media import MediaLimits
from trtx.media.errors import MediaError, too_large

_PIECE_CHARACTERS = 1 << 18  # decoded in less than a millisecond
_HEADER_CHARACTERS = 256
_WHITE = re.compile(rb"[ \t\r\n]+")
_CUT_ESCAPE = re.compile(r"%[0-9A-Fa-f]?\Z")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


async def decode(url: str, label: str, limits: MediaLimits) -> bytes:
    """The content of a ``data:`` URL. Raises MediaError: 400 for a malformed one, 413 for one that is too large."""
    return await asyncio.to_thread(_decode, url, label, limits)


def _decode(url: str, label: str, limits: MediaLimits) -> bytes:
    comma = url.find(",", 0, _HEADER_CHARACTERS)
    if comma < 0:
        raise MediaError(400, f"{label} has no comma before its data; expected data:image/png;base64,...")
    is_base64 = url[5:comma].lower().replace(" ", "").endswith(";base64")
    smallest = (len(url) - comma) // (12 if is_base64 else 3)  # decoded bytes if every character is escaped
    if smallest > limits.max_media_bytes:
        raise too_large(label, limits.max_media_bytes)
    found, size = [], 0
    try:
        for piece in _from_base64(url, comma + 1) if is_base64 else _unescaped(url, comma + 1):
            size += len(piece)
            if size > limits.max_media_bytes:
                raise too_large(label, limits.max_media_bytes)
            found.append(piece)
    except ValueError:  # also binascii.Error, a subclass
        wanted = "base64 with + and /, filled up with =" if is_base64 else "ASCII, two hexadecimal digits behind each %"
        raise MediaError(
            400, f"{label} has data that are broken or cut short; expected {wanted}: send all of it"
        ) from None
    return b"".join(found)


def _unescaped(url: str, start: int) -> Iterator[bytes]:
    """Yields the percent-decoded data in pieces.

    Raises ValueError for characters that RFC 3986 does not allow in a URL.
    """
    while start < len(url):
        text = url[start : start + _PIECE_CHARACTERS]
        if start + len(text) < len(url) and (cut := _CUT_ESCAPE.search(text)):
            text = text[: cut.start()]
        start += len(text)
        if _BAD_ESCAPE.search(text):
            raise ValueError("a percent sign without two digits")
        yield _without_escapes(text.encode("ascii"))


def _without_escapes(text: bytes) -> bytes:
    """Decodes percent escapes like ``urllib.parse.unquote_to_bytes``; every escape in ``text`` must be complete.

    unquote_to_bytes holds the GIL for 0.2 s per MB. The decoder for quoted-printable, which only uses another escape
    character, is written in C.
    """
    return binascii.a2b_qp(text.replace(b"=", b"=3D").replace(b"%", b"=")) if b"%" in text else text


def _from_base64(url: str, start: int) -> Iterator[bytes]:
    """Yields the decoded data in pieces. Raises ValueError.

    Accepts line breaks, which mail programs insert. Requires padding, and only at the end.
    """
    left = b""
    for piece in _unescaped(url, start):
        text = left + _WHITE.sub(b"", piece)
        whole = (len(text) - 1) // 4 * 4  # the last four characters may contain padding and are decoded at the end
        if whole > 0:
            decoded = binascii.a2b_base64(text[:whole], strict_mode=True)
            if len(decoded) != whole // 4 * 3:
                raise ValueError("padding in the middle")
            yield decoded
            text = text[whole:]
        left = text
    if left:
        yield binascii.a2b_base64(left, strict_mode=True)
