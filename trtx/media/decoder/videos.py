"""Decodes the frames of a video that a model uses, with PyAV, which contains its own FFmpeg.

PyAV is an optional extra (``trtx.config.video_decoder``); no other module imports it. Every change of a pixel needs
another ``VIDEO_DECODING`` in ``trtx/media/keys.py``.
"""

from __future__ import annotations

import io
import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, TypeVar

import av
from av.sidedata.sidedata import Type as DataType
from av.stream import Disposition
from PIL import Image

from trtx.media.errors import MediaError

_T = TypeVar("_T")
Container = Literal["mov", "matroska"]
CONTAINERS = "MP4 (MOV) or WebM (Matroska)"
CODECS = frozenset(("h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg"))
# Transpositions by the signs of the display matrix's upper left 2x2, which says where the stored frame's right and down
# are shown.
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
_SKEW = 1 / 512  # relative to the largest entry: tolerance for the rounding of a cosine of 90 degrees
_ROUNDED_S = 0.002  # Matroska rounds a frame's time and its duration to milliseconds separately

av.logging.set_level(None)  # FFmpeg's messages contain parts of files


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """The first video stream as it is shown, counted from its packets instead of read from the header.

    ``times``: when each frame is shown, in seconds from the first one, ascending; None if all are within half a frame
    of constant ``fps``. ``seconds``: the end of the last frame.
    """

    frames: int
    fps: float
    seconds: float
    times: tuple[float, ...] | None
    height: int
    width: int


def container_of(data: bytes | bytearray, label: str) -> Container:
    """The container format, from the content. Raises MediaError 415."""
    if data[4:8] == b"ftyp":
        return "mov"
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    raise MediaError(415, f"{label} is not a video of a supported format; expected {CONTAINERS}")


def look_at(data: bytes | bytearray, label: str, *, max_pixels: int, max_seconds: float) -> VideoFacts:
    """Counts the frames without decoding. Raises MediaError; MemoryError if the process's limit is reached."""
    return _guarded(label, lambda: _look_at(data, label, max_pixels, max_seconds))


def take(
    data: bytes | bytearray,
    label: str,
    indices: Sequence[int],
    made: Callable[[Image.Image], Image.Image],
    *,
    max_pixels: int,
) -> list[Image.Image]:
    """Decodes the frames ``indices`` (non-decreasing) and returns ``made`` of each.

    Frames are RGB, transposed as the file says. Raises the errors of :func:`look_at` and of ``made``.
    """
    return _guarded(label, lambda: _take(data, label, indices, made, max_pixels))


def _guarded(label: str, work: Callable[[], _T]) -> _T:
    try:
        return work()
    except (MediaError, MemoryError):
        raise
    except Exception as error:
        # FFmpeg's ENOMEM: caused by a large file, or by one with false sizes
        if isinstance(error, av.error.FFmpegError) and error.errno == 12:
            raise MemoryError from None
        raise _broken(label) from None


def _opened(data: bytes | bytearray, label: str, max_pixels: int) -> Any:
    """Opens a container and checks what its header shows. FFmpeg may not open any other file or address."""
    container = av.open(
        io.BytesIO(data),
        format=container_of(data, label),
        options={"max_pixels": str(max_pixels)},
        io_open=_refuse_to_open,
        metadata_errors="replace",
    )
    stream = _stream(container)
    if stream is None:
        container.close()
        raise MediaError(422, f"{label} holds no video stream, or ends before it; send the whole file")
    if (name := stream.codec_context.codec.canonical_name) not in CODECS:
        container.close()
        raise MediaError(
            415, f"{label} is encoded as {name}, which is not supported; expected one of {', '.join(sorted(CODECS))}"
        )
    stream.thread_count = 1  # one file per process, and several processes per pool
    return container


def _stream(container: Any) -> Any:
    """The first video stream, or None. Cover images of music files do not count."""
    return next((one for one in container.streams.video if not one.disposition & Disposition.attached_pic), None)


def _refuse_to_open(*_: object, **__: object) -> Any:
    raise PermissionError("a video names another file")


def _look_at(data: bytes | bytearray, label: str, max_pixels: int, max_seconds: float) -> VideoFacts:
    with _opened(data, label, max_pixels) as container:
        stream = _stream(container)
        height, width = stream.codec_context.height, stream.codec_context.width
        _check_pixels(width, height, label, max_pixels)
        ends, shown = _Ends(), []
        for packet in container.demux():
            if not packet.size:
                continue
            ends.add(packet, is_shown=packet.stream.index == stream.index)
            if packet.stream.index != stream.index or packet.is_discard:
                continue
            if packet.is_corrupt:  # for an MP4: its end is missing
                raise _broken(label)
            shown.append((_time_s(packet, label), float((packet.duration or 0) * packet.time_base)))
        if not shown:
            raise _broken(label)
        ends.check(container, stream, label, is_fragmented=b"moof" in data)
        return _played(shown, stream.average_rate or stream.guessed_rate, label, max_seconds, height, width)


def _time_s(packet: Any, label: str) -> float:
    if (at := packet.dts if packet.pts is None else packet.pts) is None or packet.time_base is None:
        raise MediaError(422, f"{label} has no timestamps for its frames; encode it with timestamps")
    return float(at * packet.time_base)


def _played(
    shown: list[tuple[float, float]], rate: Fraction | None, label: str, max_seconds: float, height: int, width: int
) -> VideoFacts:
    """The facts of a video. ``shown``: time and duration of each frame, 0 if not stated. ``rate``: from the header."""
    shown.sort()
    count, first_s = len(shown), shown[0][0]
    times = tuple(at - first_s for at, _ in shown)
    last_s = shown[-1][1] or (1 / float(rate) if rate else times[-1] / max(count - 1, 1))
    seconds = times[-1] + last_s
    if seconds > max_seconds:
        raise MediaError(413, f"{label} plays longer than {max_seconds:g} s, the limit of --max-video-s")
    if seconds <= 0:
        raise MediaError(422, f"{label} has no frame rate; encode it with one")
    fps = float(rate) if rate else count / seconds
    if all(abs(at * fps - number) <= 0.5 for number, at in enumerate(times)):
        return VideoFacts(count, fps, count / fps, None, height, width)
    return VideoFacts(count, count / seconds, seconds, times, height, width)


@dataclass(slots=True)
class _Ends:
    """The ends of a file's packets, in seconds on the file's clock: of the selected video stream and of all streams."""

    first_s: float = math.inf
    shown_s: float = 0.0
    all_s: float = 0.0

    def add(self, packet: Any, *, is_shown: bool) -> None:
        if (at := packet.dts if packet.pts is None else packet.pts) is None or packet.time_base is None:
            return
        end_s = float((at + (packet.duration or 0)) * packet.time_base)
        self.all_s = max(self.all_s, end_s)
        if is_shown:
            self.first_s = min(self.first_s, float(at * packet.time_base))
            self.shown_s = max(self.shown_s, end_s)

    def check(self, container: Any, stream: Any, label: str, *, is_fragmented: bool) -> None:
        """Raises MediaError if the file states a later end, for the video stream or else for the whole file."""
        if stream.duration is not None and "mov" in container.format.name:
            # Duration counts from the first frame; for fragmented files, FFmpeg reports the end on the file's clock.
            start_s = 0.0 if is_fragmented else min(self.first_s, self.shown_s)
            found_s, stated_s = self.shown_s - start_s, float(stream.duration * stream.time_base)
        elif (of_track := _clock_s(stream.metadata.get("DURATION"))) is not None:
            found_s, stated_s = self.shown_s, of_track
        else:
            is_alone = len(container.streams) == 1
            found_s, stated_s = self.shown_s if is_alone else self.all_s, (container.duration or 0) / av.time_base
        if found_s < stated_s - _ROUNDED_S - 1e-6:
            raise MediaError(
                422,
                f"{label} is broken or cut short: it states {stated_s:.3f} s and its frames end at {found_s:.3f} s; "
                "send the whole file, or correct the duration in its header",
            )


def _clock_s(text: str | None) -> float | None:
    """Parses Matroska's tag DURATION, ``hh:mm:ss.fraction``; None for other text."""
    found = re.fullmatch(r"(\d+):(\d+):(\d+(?:\.\d+)?)", text or "")
    return None if found is None else int(found[1]) * 3600 + int(found[2]) * 60 + float(found[3])


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
        for number, frame in enumerate(container.decode(_stream(container))):
            if frame.is_corrupt:  # FFmpeg concealed an error, and later frames depend on this one
                raise _broken(label)
            if number != wanted[len(found)]:
                continue
            _check_pixels(frame.width, frame.height, label, max_pixels)
            picture = Image.fromarray(frame.to_ndarray(format="rgb24"))
            turn = _turn(frame, label)
            one = made(picture if turn is None else picture.transpose(turn))
            found += [one] * wanted.count(number)
            if len(found) == len(wanted):
                return found
    raise _broken(label)


def _turn(frame: Any, label: str) -> Image.Transpose | None:
    """The transposition from the frame's display matrix.

    Raises MediaError for an angle that is not a multiple of 90 degrees.
    """
    found = next((data for data in frame.side_data if data.type is DataType.DISPLAYMATRIX), None)
    if found is None:
        return None
    right_x, right_y, _, down_x, down_y, *_ = _MATRIX.unpack(bytes(found)[: _MATRIX.size])
    entries = (right_x, right_y, down_x, down_y)
    least = max(map(abs, entries)) * _SKEW
    signs = tuple(0 if abs(one) <= least else 1 if one > 0 else -1 for one in entries)
    if signs not in _TURNS:
        raise MediaError(
            422, f"{label} has a rotation that is not a multiple of 90 degrees; encode it with upright frames"
        )
    return _TURNS[signs]


def _check_pixels(width: int, height: int, label: str, max_pixels: int) -> None:
    if width < 1 or height < 1:
        raise _broken(label)
    if width * height > max_pixels:
        raise MediaError(413, f"{label} has frames of {width}x{height} pixels; expected at most {max_pixels} in all")


def _broken(label: str) -> MediaError:
    return MediaError(422, f"{label} is broken or cut short; send the whole file")
