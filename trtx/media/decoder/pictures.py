"""Decodes an image file to RGB as a viewer would show it on a white page.

Every change of a pixel needs another ``DECODING`` in ``trtx/media/keys.py``, because cached embeddings depend on it.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image, ImageFile

from trtx.media.decoder.headers import FORMATS, format_of, webp_size
from trtx.media.errors import MediaError

# Transpositions by EXIF orientation; none for 1 and for values outside the standard.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION = 0x0112
_PNG_DEPTH = 24  # offset of the bit depth in IHDR
_OPAQUE = ("1", "L", "P", "RGB", "CMYK", "YCbCr")
_ALPHA = ("LA", "PA", "RGBA")
_GRAY_16 = ("I;16", "I;16B", "I;16L", "I")

ImageFile.LOAD_TRUNCATED_IMAGES = False
Image.MAX_IMAGE_PIXELS = None  # the caller checks the limit and raises an error instead of Pillow's warning


def decode(data: bytes | bytearray, label: str, max_pixels: int) -> Image.Image:
    """The image in mode RGB, rotated as EXIF says. Raises MediaError; MemoryError if the process's limit is reached.

    Transparent parts become white. 16-bit channels are scaled to 8 bits: gray is rounded, colour and images with alpha
    keep the upper byte. Colour profiles are not applied. Of a JPEG with several images (MPO), the first is used, which
    is the photograph.
    """
    with _opened(data, label, max_pixels) as picture:
        _check_frames(picture, label)
        picture.load()
        _set_clear_color(picture, data)
        turn = _turn(picture)
        rgb = _on_white(picture, label)
    del picture  # frees its pixels before the transposition makes a third copy
    return rgb if turn is None else rgb.transpose(turn)


def size_of(data: bytes | bytearray, label: str, max_pixels: int) -> tuple[int, int]:
    """Width and height from the header, before any rotation.

    Raises MediaError for faults that the header shows; MemoryError if the process's limit is reached.
    """
    if format_of(data, label) == "WEBP":
        return _webp_size(data, label, max_pixels)
    with _opened(data, label, max_pixels) as picture:
        return picture.size


@contextmanager
def _opened(data: bytes | bytearray, label: str, max_pixels: int) -> Iterator[Image.Image]:
    """Opens an image of at most ``max_pixels``.

    Converts exceptions from inside the block to those of :func:`decode`.
    """
    kind = format_of(data, label)
    if kind == "WEBP":
        _webp_size(data, label, max_pixels)
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(data), formats=[kind]) as picture:
            _check_pixels(picture.size, label, max_pixels)
            yield picture
    except (MediaError, MemoryError):
        raise
    except Exception:
        # Pillow's own message may contain bytes of the file, and it raises a dozen classes for broken files.
        raise _broken(label) from None


def _webp_size(data: bytes | bytearray, label: str, max_pixels: int) -> tuple[int, int]:
    """The size from WebP's own header, checked before Pillow allocates memory."""
    size = webp_size(data)
    if size is None:
        raise _broken(label)
    _check_pixels(size, label, max_pixels)
    return size


def _check_pixels(size: tuple[int, int], label: str, max_pixels: int) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise _broken(label)
    if width * height > max_pixels:
        raise MediaError(413, f"{label} has {width}x{height} pixels; expected at most {max_pixels} in all")


def _check_frames(picture: Image.Image, label: str) -> None:
    if picture.format != "MPO" and getattr(picture, "is_animated", False):
        raise MediaError(415, f"{label} is animated; send the frames that you need as still images: {FORMATS}")


def _set_clear_color(picture: Image.Image, data: bytes | bytearray) -> None:
    """Scales the transparent colour of a PNG's tRNS chunk in the same way as Pillow scales the pixels.

    Pillow 12.3 compares the chunk's 2-, 4- or 16-bit value with its own 8-bit pixels, so it matches the wrong pixels or
    none.
    """
    clear = picture.info.get("transparency")
    if picture.format != "PNG" or isinstance(clear, bytes | None):
        return
    depth = data[_PNG_DEPTH]
    if picture.mode == "L" and depth < 8:
        picture.info["transparency"] = clear * 255 // (2**depth - 1)
    elif picture.mode == "RGB" and depth == 16:
        picture.info["transparency"] = tuple(value >> 8 for value in clear)


def _on_white(picture: Image.Image, label: str) -> Image.Image:
    mode, clear = picture.mode, picture.info.get("transparency")
    if mode in _GRAY_16:
        return _from_gray_16(picture, clear)
    if mode in _ALPHA or (mode in _OPAQUE and clear is not None):
        seen = picture.convert("RGBA")
        page = Image.new("RGB", picture.size, (255, 255, 255))
        page.paste(seen, mask=seen.getchannel("A"))
        return page
    if mode in _OPAQUE:
        return picture.convert("RGB")
    raise MediaError(415, f"{label} has pixels of a kind that is not taken ({mode}); expected RGB, gray or CMYK")


def _from_gray_16(picture: Image.Image, clear: object) -> Image.Image:
    values = np.asarray(picture).astype(np.uint32)
    gray = ((values * 255 + 32767) // 65535).clip(0, 255).astype(np.uint8)
    if isinstance(clear, int):
        gray[values == clear] = 255
    return Image.fromarray(gray).convert("RGB")


def _turn(picture: Image.Image) -> Image.Transpose | None:
    try:
        return _TURNS.get(picture.getexif().get(_ORIENTATION, 1))
    except Exception:  # broken EXIF data contains no orientation; browsers show such photographs too
        return None


def _broken(label: str) -> MediaError:
    return MediaError(422, f"{label} is broken or cut short; send the whole file")
