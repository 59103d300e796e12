"""Selects a video's frames, their size and their times, in the same way as transformers' video processors.

Those need torchvision, which does not load beside the CPU build of torch, and a decoding process has no torch.
``tests/unit/media/test_video_sampling.py`` compares this arithmetic with theirs (5.23).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trtx.errors import UsageError
from trtx.ipc.encoder_messages import Clip
from trtx.media.messages import VideoRule

_LARGEST_ASPECT = 200
_VIDEO_DOCUMENTS = ("video_preprocessor_config.json", "preprocessor_config.json")
_IN_PROCESSOR = ("processor_config.json", "video_processor")
# Options that must agree between video and image processor if both state them, because frames pass through the image
# processor.
_AS_OF_PICTURES = (
    "image_mean", "image_std", "rescale_factor", "patch_size", "merge_size", "temporal_patch_size", "resample",
)  # fmt: skip
_TICK_S = 1e-6  # tolerance: a frame that begins at a moment counts as shown then, despite rounding
FPS, MIN_FRAMES, MAX_FRAMES = 2.0, 4, 768


@dataclass(frozen=True, slots=True)
class VideoOptions:
    """The video options of one checkpoint.

    ``counts_all_frames``: True for Qwen3-VL, whose pixel limits apply to all frames together and whose frames are
    spread from the first to the last; False for Qwen2.5-VL, whose limits apply to each frame and whose frames are
    spread over equal parts.
    """

    counts_all_frames: bool
    patch: int
    merge: int
    temporal_patch: int
    min_pixels: int
    max_pixels: int
    fps: float = FPS
    min_frames: int = MIN_FRAMES
    max_frames: int = MAX_FRAMES
    max_tokens_to_cap: int | None = None  # with cap_pixels_per_frame: limits each frame's pixels by max_video_tokens

    @property
    def factor(self) -> int:
        """Side length in pixels of the square that one embedding row represents."""
        return self.patch * self.merge


def read_options(model_dir: Path, processor: Any, rule: VideoRule) -> VideoOptions:
    """The options in transformers' order of precedence: nested in processor_config.json, else a file of their own, else
    the image processor's file.

    ``processor``: the checkpoint's image processor, which makes the patches. Raises UsageError.
    """
    stated, is_third = _stated(model_dir), rule == "all"
    size = stated.get("size") or {}
    classic = {} if is_third else stated  # Qwen3-VL's class ignores min_pixels and max_pixels
    default = (128 * 32 * 32, 32 * 32 * 768) if is_third else (128 * 28 * 28, 28 * 28 * 768)
    try:
        least = int(classic.get("min_pixels") or size.get("shortest_edge") or default[0])
        most = int(classic.get("max_pixels") or size.get("longest_edge") or default[1])
        capped = stated.get("max_video_tokens", 768 if is_third else 128000)
        found = VideoOptions(
            counts_all_frames=is_third,
            patch=int(processor.patch_size),
            merge=int(processor.merge_size),
            temporal_patch=int(processor.temporal_patch_size),
            min_pixels=least,
            max_pixels=most,
            fps=float(stated.get("fps") or FPS),
            min_frames=int(stated.get("min_frames") or MIN_FRAMES),
            max_frames=int(stated.get("max_frames") or MAX_FRAMES),
            max_tokens_to_cap=int(capped) if stated.get("cap_pixels_per_frame") else None,
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"the video processor's options in {model_dir} can't be read ({error})") from error
    for name in _AS_OF_PICTURES:
        own, of_pictures = _listed(stated.get(name)), _listed(getattr(processor, name, None))
        if own is not None and of_pictures is not None and own != of_pictures:
            raise UsageError(
                f"the video processor's {name} in {model_dir} is {own}, and the image processor's is {of_pictures}: "
                "both must be the same here, since frames are prepared as images are"
            )
    if min(found.min_pixels, found.max_pixels, found.min_frames, found.max_frames, found.fps) <= 0:
        raise UsageError(f"the video processor's options in {model_dir} hold a limit that is not above 0")
    return found


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _stated(model_dir: Path) -> Mapping[str, Any]:
    """The video processor's own options. Raises UsageError for a document that is not a JSON object."""
    name, inner = _IN_PROCESSOR
    if (nested := _document(model_dir / name).get(inner)) is not None:
        return dict(nested)
    for name in _VIDEO_DOCUMENTS:
        if found := _document(model_dir / name):
            return found
    return {}


def _document(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"{path} is not JSON ({error}); download the checkpoint again") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds no JSON object; download the checkpoint again")
    return found


def frame_indices(options: VideoOptions, count: int, fps: float, most: int) -> list[int]:
    """Ascending indices of the frames to use: ``options.fps`` per second, at most ``most``.

    ``count`` and ``fps`` are the video's number of frames and frame rate.
    """
    taken = _taken(options, count, count / fps, most)
    if options.counts_all_frames:
        found: list[int] = np.linspace(0, count - 1, taken).round().astype(int).tolist()
        return found
    return [at * count // taken for at in range(taken)]


def frames_by_time(options: VideoOptions, times: Sequence[float], seconds: float, most: int) -> tuple[list[int], Clip]:
    """The same for a video with a variable frame rate, and the times of the grid's steps.

    Takes the frames that are shown at moments spaced as in :func:`frame_indices`, so a frame that stays on screen may
    be taken more than once. ``times``: of each frame, ascending from 0; ``seconds``: the end of the last frame.
    """
    taken = _taken(options, len(times), seconds, most)
    ends_s, is_last = (times[-1], True) if options.counts_all_frames else (seconds, False)
    moments = np.linspace(0, ends_s, taken, endpoint=is_last)
    indices = (np.searchsorted(times, moments + _TICK_S, side="right") - 1).tolist()
    return indices, _clip(options, moments.tolist(), options.temporal_patch * seconds / taken)


def _taken(options: VideoOptions, count: int, seconds: float, most: int) -> int:
    wanted = max(seconds * options.fps, options.min_frames)
    if options.counts_all_frames:
        return max(min(int(wanted), options.max_frames, count, most), 1)
    step = options.temporal_patch
    largest = math.floor(min(options.max_frames, count, most) / step) * step
    return math.floor(min(wanted, largest, count) / step) * step or 1


def clip_of(options: VideoOptions, indices: list[int], count: int, fps: float) -> Clip:
    """The times of the grid's steps."""
    return _clip(options, [index / fps for index in indices], options.temporal_patch / (len(indices) / count * fps))


def _clip(options: VideoOptions, moments: list[float], step_s: float) -> Clip:
    size = options.temporal_patch
    padded = [*moments, *(moments[-1:] * (-len(moments) % size))]
    return Clip(step_s, tuple((padded[at] + padded[at + size - 1]) / 2 for at in range(0, len(padded), size)))


def frame_size(options: VideoOptions, frames: int, height: int, width: int) -> tuple[int, int]:
    """Height and width to which each frame is resized, multiples of ``options.factor``.

    Raises ValueError for a shape that no model takes.
    """
    factor, least, most = options.factor, options.min_pixels, options.max_pixels
    if options.max_tokens_to_cap is not None:
        most = _capped(options, frames)
    if options.counts_all_frames and (height < factor or width < factor):
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > _LARGEST_ASPECT:
        raise ValueError(f"a side is more than {_LARGEST_ASPECT} times the other")
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    counted = max(frames, options.temporal_patch) if options.counts_all_frames else 1
    rounded = round(counted / options.temporal_patch) * options.temporal_patch or 1
    if rounded * high * wide > most:
        shrink = math.sqrt(counted * height * width / most)
        high = max(factor, math.floor(height / shrink / factor) * factor)
        wide = max(factor, math.floor(width / shrink / factor) * factor)
    elif rounded * high * wide < least:
        grow = math.sqrt(least / (counted * height * width))
        high = math.ceil(height * grow / factor) * factor
        wide = math.ceil(width * grow / factor) * factor
    return high, wide


def _capped(options: VideoOptions, frames: int) -> int:
    assert options.max_tokens_to_cap is not None
    area = options.factor**2
    floor = int(options.min_pixels * 1.05)
    if options.counts_all_frames:
        return frames * max(min(options.max_tokens_to_cap * area, options.max_pixels // frames), floor)
    total = int(options.max_tokens_to_cap * area * 0.9)
    return max(min(options.max_pixels, total * options.temporal_patch // frames), floor)
