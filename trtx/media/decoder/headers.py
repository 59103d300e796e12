"""Reads image headers before a decoder does."""

from __future__ import annotations

from typing import Literal

from trtx.media.errors import MediaError

Format = Literal["JPEG", "PNG", "WEBP", "GIF"]
FORMATS = "JPEG, PNG, WEBP or GIF"


def format_of(data: bytes | bytearray, label: str) -> Format:
    """The image format, from its content; names and declared types are ignored. Raises MediaError 415."""
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    raise MediaError(415, f"{label} is not an image of a supported format; expected {FORMATS}")


def webp_size(data: bytes | bytearray) -> tuple[int, int] | None:
    """Width and height, or None for a broken header.

    Needed because Pillow 12 allocates two canvases when it opens a file.
    """
    kind, body = data[12:16], data[20:30]
    if len(body) < 10:
        return None
    if kind == b"VP8X":
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if kind == b"VP8L" and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
        return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
    return None
