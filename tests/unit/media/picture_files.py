"""Picture files made here, with the pixels that a person would see: computed from the values that went in, in numpy."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 37, 23  # no multiple of a byte's pixels or of a block's
Array = np.ndarray[Any, Any]

_GRAY, _RGB, _PALETTE, _GRAY_ALPHA, _RGBA = 0, 2, 3, 4, 6
_CHANNELS = {_GRAY: 1, _RGB: 3, _PALETTE: 1, _GRAY_ALPHA: 2, _RGBA: 4}
PNG_DEPTHS = {_GRAY: (1, 2, 4, 8, 16), _RGB: (8, 16), _PALETTE: (1, 2, 4, 8), _GRAY_ALPHA: (8, 16), _RGBA: (8, 16)}
"""Every kind of PNG that there is: bits a channel, by colour type."""


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_header(width: int, height: int, depth: int = 8, color: int = _RGB) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))


def png(values: Array, depth: int, color: int, before: bytes = b"") -> bytes:
    """``values``: [height, width, channels]. ``before``: chunks before the pixels."""
    height, width = values.shape[:2]
    rows = values.reshape(height, -1)
    if depth == 16:
        packed = rows.astype(">u2").view(np.uint8).reshape(height, -1)
    elif depth == 8:
        packed = rows.astype(np.uint8)
    else:
        bits = (rows[..., None] >> np.arange(depth - 1, -1, -1)) & 1
        packed = np.packbits(bits.reshape(height, -1).astype(np.uint8), axis=1)
    lines = np.concatenate([np.zeros((height, 1), np.uint8), packed], axis=1)
    body = chunk(b"IDAT", zlib.compress(lines.tobytes())) + chunk(b"IEND", b"")
    return png_header(width, height, depth, color) + before + body


def png_case(depth: int, color: int, *, clear: bool) -> tuple[bytes, Array]:
    """A PNG of random values, and its pixels. ``clear``: with a tRNS chunk, which gray, RGB and palettes may have."""
    random = np.random.default_rng(3 + 100 * depth + color)
    values = random.integers(0, 2**depth, (HEIGHT, WIDTH, _CHANNELS[color]))
    before = b""
    if color == _PALETTE:
        palette = random.integers(0, 256, (2**depth, 3))
        before = chunk(b"PLTE", palette.astype(np.uint8).tobytes())
        alpha = np.full(2**depth, 255)
        if clear:
            alpha[: 2**depth - 1] = random.integers(0, 256, 2**depth - 1)
            before += chunk(b"tRNS", alpha[:-1].astype(np.uint8).tobytes())
        return png(values, depth, color, before), on_white(palette[values[..., 0]], alpha[values[..., 0]])
    channels = 3 if color in (_RGB, _RGBA) else 1
    colors = values[..., :channels]
    shown = _eight_bits(colors, depth, upper=color != _GRAY)
    alpha = np.full((HEIGHT, WIDTH), 255)
    if color in (_GRAY_ALPHA, _RGBA):
        alpha = _eight_bits(values[..., -1:], depth, upper=True)[..., 0]
    elif clear:
        gone = colors[5, 7]
        alpha = np.where((colors == gone).all(axis=-1), 0, 255)
        before = chunk(b"tRNS", struct.pack(f">{channels}H", *gone))
    return png(values, depth, color, before), on_white(np.broadcast_to(shown, (HEIGHT, WIDTH, 3)), alpha)


def _eight_bits(values: Array, depth: int, *, upper: bool) -> Array:
    """16 bits: gray alone is rounded, of colour and alpha the upper byte is taken, as docs/multimodal.md has it."""
    if depth == 16 and upper:
        return values >> 8
    return np.rint(values * 255 / (2**depth - 1)).astype(int)


def on_white(colors: Array, alpha: Array) -> Array:
    """[height, width, 3] uint8."""
    alpha = alpha[..., None]
    return np.rint((colors * alpha + 255 * (255 - alpha)) / 255).astype(np.uint8)


def drawing() -> Array:
    """[HEIGHT, WIDTH, 3] uint8 with no symmetry, smooth enough for lossy formats."""
    down, across = np.mgrid[0:HEIGHT, 0:WIDTH]
    return np.stack([down * 11, across * 6, (down + across) * 4], axis=-1).clip(0, 255).astype(np.uint8)


def saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def with_orientation(kind: str, value: int, **options: Any) -> bytes:
    """``drawing()`` with an EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = value
    return saved(Image.fromarray(drawing()), kind, exif=exif.tobytes(), **options)


TURNED = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a),
}
"""What the standard asks for, by its value: where the stored first row and column belong."""
