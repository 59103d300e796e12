"""A video file becomes the frames that a model sees of it, by PyAV, which brings its own FFmpeg.

A change of one pixel is another ``VIDEO_DECODING`` in ``trtx/media/keys.py``.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import av
from av.sidedata.sidedata import Type as DataType
from PIL import Image

from trtx.media.errors import MediaError

_T = TypeVar("_T")
Container = Literal["mov", "matroska"]
CONTAINERS = "MP4 (MOV) or WebM (Matroska)"
CODECS = frozenset(("h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg"))
# By the signs of a display matrix's upper left 2x2: where a stored picture's right and down are shown.
_TURNS = {
    (1, 0, 0, 1): None,
    (0, -1, 1, 0): Image.Transpose.ROTATE_90,
    (-1, 0, 0, -1): Image.Transpose.ROTATE_180,
    (0, 1, -1, 0): Image.Transpose.ROTATE_270,
    (-1, 0, 0, 1): Image.Transpose.FLIP_LEFT_RIGHT,
    (1, 0, 0, -1): Image.Transpose.FLIP_TOP_BOTTOM,
    (0, 1, 1, 0): Image.Transpose.TRANSPOSE,
    (0, -1, -1, 0): Image.Transpose.TRANSVERSE,
}
_MATRIX = struct.Struct("=9i")
_SKEW = 1 / 512  # of the larger entry: what a cosine of 90 degrees may be rounded to
_LOST_S = 1.0  # of what a header says, that need not be there: sound may end later, and rates are rounded

av.logging.set_level(None)  # FFmpeg's texts hold parts of files


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """What was counted, not what a header says: of the first video stream, as it is shown."""

    frames: int
    fps: float
    height: int
    width: int

    @property
    def seconds(self) -> float:
        return self.frames / self.fps


def container_of(data: bytes | bytearray, label: str) -> Container:
    """By content. Raises MediaError 415."""
    if data[4:8] == b"ftyp":
        return "mov"
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    raise MediaError(415, f"{label} is no video of a kind that is taken; expected {CONTAINERS}")


def look_at(data: bytes | bytearray, label: str, *, max_pixels: int, max_seconds: float) -> VideoFacts:
    """Counts frames without decoding any. Raises MediaError; MemoryError where the process may take no more."""
    return _guarded(label, lambda: _look_at(data, label, max_pixels, max_seconds))


def take(
    data: bytes | bytearray,
    label: str,
    indices: Sequence[int],
    made: Callable[[Image.Image], Image.Image],
    *,
    max_pixels: int,
) -> list[Image.Image]:
    """``made`` of the frames ``indices``, which rise: RGB, turned and mirrored as the file says. Raises as
    :func:`look_at` does, and what ``made`` raises."""
    return _guarded(label, lambda: _take(data, label, indices, made, max_pixels))


def _guarded(label: str, work: Callable[[], _T]) -> _T:
    try:
        return work()
    except (MediaError, MemoryError):
        raise
    except Exception as error:
        # FFmpeg's own ENOMEM, which a lying file brings about as well as a large one.
        if isinstance(error, av.error.FFmpegError) and error.errno == 12:
            raise MemoryError from None
        raise _broken(label) from None


def _opened(data: bytes | bytearray, label: str, max_pixels: int) -> Any:
    """A container with what it holds checked as far as its header says. No other file or address is opened for it."""
    container = av.open(
        io.BytesIO(data),
        format=container_of(data, label),
        options={"max_pixels": str(max_pixels)},
        io_open=_refuse_to_open,
        metadata_errors="replace",
    )
    if not container.streams.video:
        container.close()
        raise MediaError(422, f"{label} holds no video stream, or ends before it; send the whole file")
    stream = container.streams.video[0]
    if (name := stream.codec_context.codec.canonical_name) not in CODECS:
        container.close()
        raise MediaError(
            415, f"{label} is encoded as {name}, which is not taken; expected one of {', '.join(sorted(CODECS))}"
        )
    stream.thread_count = 1  # each process has one file, and the pool several processes
    return container


def _refuse_to_open(*_: object, **__: object) -> Any:
    raise PermissionError("a video names another file")


def _look_at(data: bytes | bytearray, label: str, max_pixels: int, max_seconds: float) -> VideoFacts:
    with _opened(data, label, max_pixels) as container:
        stream = container.streams.video[0]
        height, width = stream.codec_context.height, stream.codec_context.width
        _check_pixels(width, height, label, max_pixels)
        rate = stream.average_rate or stream.guessed_rate
        if not rate:
            raise MediaError(422, f"{label} does not say how fast it plays; write it with a frame rate")
        fps, count, last_s = float(rate), 0, 0.0
        for packet in container.demux():
            if packet.pts is not None and packet.time_base is not None:
                last_s = max(last_s, float((packet.pts + (packet.duration or 0)) * packet.time_base))
            if packet.stream.index != stream.index or not packet.size or packet.is_discard:
                continue
            count += 1
            if count > max_seconds * fps:
                raise MediaError(413, f"{label} plays longer than {max_seconds:g} s, the most that a video may")
        stated_s = (container.duration or 0) / av.time_base
        if count < 1 or last_s < stated_s - max(_LOST_S, 0.02 * stated_s):
            raise _broken(label)
        return VideoFacts(count, fps, height, width)


def _take(
    data: bytes | bytearray,
    label: str,
    indices: Sequence[int],
    made: Callable[[Image.Image], Image.Image],
    max_pixels: int,
) -> list[Image.Image]:
    wanted = list(indices)
    found: list[Image.Image] = []
    with _opened(data, label, max_pixels) as container:
        for number, frame in enumerate(container.decode(video=0)):
            if number != wanted[len(found)]:
                continue
            _check_pixels(frame.width, frame.height, label, max_pixels)
            picture = Image.fromarray(frame.to_ndarray(format="rgb24"))
            turn = _turn(frame, label)
            found.append(made(picture if turn is None else picture.transpose(turn)))
            if len(found) == len(wanted):
                return found
    raise _broken(label)


def _turn(frame: Any, label: str) -> Image.Transpose | None:
    """Raises MediaError for what no exchange of rows and columns shows."""
    found = next((data for data in frame.side_data if data.type is DataType.DISPLAYMATRIX), None)
    if found is None:
        return None
    right_x, right_y, _, down_x, down_y, *_ = _MATRIX.unpack(bytes(found)[: _MATRIX.size])
    entries = (right_x, right_y, down_x, down_y)
    least = max(map(abs, entries)) * _SKEW
    signs = tuple(0 if abs(one) <= least else 1 if one > 0 else -1 for one in entries)
    if signs not in _TURNS:
        raise MediaError(
            422, f"{label} is to be shown at an angle that is no multiple of 90 degrees; write it with upright frames"
        )
    return _TURNS[signs]


def _check_pixels(width: int, height: int, label: str, max_pixels: int) -> None:
    if width < 1 or height < 1:
        raise _broken(label)
    if width * height > max_pixels:
        raise MediaError(413, f"{label} has frames of {width}x{height} pixels; expected at most {max_pixels} in all")


def _broken(label: str) -> MediaError:
    return MediaError(422, f"{label} is broken or cut short; send the whole file")
