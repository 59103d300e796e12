"""Runs a checkpoint's own image processor from transformers, on Pillow and numpy."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from trtx.config.video_decoder import NO_DECODER, decodes_videos
from trtx.errors import UsageError
from trtx.ipc.encoder_messages import Clip, Grid
from trtx.media.decoder.sampling import VideoOptions, clip_of, frame_indices, frame_size, frames_by_time, read_options
from trtx.media.errors import MediaError
from trtx.media.messages import VideoRule

logger = logging.getLogger(__name__)

_KNOWN = {"pixel_values", "image_grid_thw"}
_NO_SHAPE = "which this model can't take; send it cut to a shape that is less narrow"


@dataclass(frozen=True, slots=True)
class VideoLimits:
    """Limits of one video. ``max_pixels``: per frame; ``max_frames``: number of frames used."""

    max_pixels: int
    max_frames: int
    max_seconds: float


class ImageProcessor:
    """A checkpoint's image processor.

    Raises UsageError if the processor can't be loaded, or returns outputs that no encoder of trtx takes.
    """

    def __init__(self, model_dir: Path, videos: VideoRule | None = None) -> None:
        # transformers works without torch, and these processors do not use it: 75 MB and 1 s per process with
        # transformers 5.23, instead of 380 MB and 4 s.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        try:
            # Imported from its module: without torch, transformers 5.17 exports a stub at its top level that refuses to
            # work.
            from transformers.models.auto.image_processing_auto import AutoImageProcessor

            self._processor = AutoImageProcessor.from_pretrained(
                model_dir, backend="pil", trust_remote_code=False, local_files_only=True
            )
        except Exception as error:
            raise UsageError(
                f"{model_dir} has no image processor that loads without torchvision ({type(error).__name__}: {error}); "
                "expected a preprocessor_config.json of a class that transformers has on Pillow"
            ) from error
        try:
            self.prepare(Image.new("RGB", (64, 48), (255, 255, 255)), "a white image", sys.maxsize)
        except MediaError as error:
            raise UsageError(f"the image processor of {model_dir} fails: {error}") from error
        self._video: VideoOptions | None = None
        if videos is not None:
            self._video = read_options(model_dir, self._processor, videos)

    def prepare(self, picture: Image.Image, label: str, max_pixels: int) -> tuple[np.ndarray, Grid | None]:
        """float32 ``pixel_values`` of one RGB image, in the shape that the model's class expects, and its grid.

        Raises MediaError: 422 for an image that the processor refuses, 413 for one that it would enlarge beyond
        ``max_pixels`` in between; UsageError for an unknown output.
        """
        self._check_enlarged(picture, label, max_pixels)
        try:
            found = self._processor(images=[picture], return_tensors="np")
        except MemoryError:
            raise
        except Exception:
            logger.exception("the image processor failed on %s of %dx%d pixels", label, *picture.size)
            width, height = picture.size
            raise MediaError(422, f"{label} has {width}x{height} pixels, {_NO_SHAPE}") from None
        if unknown := set(found) - _KNOWN:
            raise UsageError(
                f"the image processor {type(self._processor).__name__} gives {', '.join(sorted(unknown))}, which no "
                f"encoder of trtx takes; expected {' and '.join(sorted(_KNOWN))} alone"
            )
        pixels = np.ascontiguousarray(found["pixel_values"], dtype=np.float32)
        grids = found.get("image_grid_thw")
        if grids is None:
            return pixels, None
        time, height, width = (int(one) for one in grids[0])
        return pixels, (time, height, width)

    def patches(self, width: int, height: int) -> int | None:
        """Number of patches that :meth:`prepare` would make of an image of this size, also rotated; None: unknown."""
        count = getattr(self._processor, "get_number_of_image_patches", None)
        if count is None or not getattr(self._processor, "do_resize", True):
            return None
        try:
            return int(count(height, width))
        except ValueError:  # a shape that the processor refuses: prepare raises the error
            return None

    def _check_enlarged(self, picture: Image.Image, label: str, max_pixels: int) -> None:
        """Raises MediaError 413 for an image that the processor would temporarily enlarge too much.

        CLIP's processor scales the shorter side to the model's size before it crops the centre: an image of 1 by 10,000
        pixels temporarily becomes 336 by 3,360,000.
        """
        size = getattr(self._processor, "size", None) or {}
        shortest = size.get("shortest_edge")
        is_bounded = size.get("longest_edge") is not None  # with both edges, the area is bounded
        if shortest is None or is_bounded or not getattr(self._processor, "do_resize", True):
            return
        width, height = picture.size
        pixels = shortest * shortest * max(width, height) // min(width, height)
        if pixels > max(max_pixels, shortest * shortest):
            raise MediaError(
                413,
                f"{label} has {width}x{height} pixels, of which this model's processor would make {pixels} before it "
                f"cuts it; expected at most {max_pixels}: send a part of it",
            )

    def prepare_video(self, data: bytearray, label: str, limits: VideoLimits) -> tuple[np.ndarray, Grid, Clip]:
        """``[patches, values]`` of a video's frames, their grid and times. Raises the errors of :meth:`prepare`."""
        options = self._video
        if options is None:
            raise MediaError(415, f"{label} is a video, and this model supports images only")
        if not decodes_videos():
            raise MediaError(415, f"{label} can't be decoded: {NO_DECODER}")
        from trtx.media.decoder import videos  # imported late: FFmpeg takes 40 MB, which images do not need

        facts = videos.look_at(data, label, max_pixels=limits.max_pixels, max_seconds=limits.max_seconds)
        if facts.times is None:
            indices = frame_indices(options, facts.frames, facts.fps, limits.max_frames)
            clip = clip_of(options, indices, facts.frames, facts.fps)
        else:
            indices, clip = frames_by_time(options, facts.times, facts.seconds, limits.max_frames)
        sizes: dict[tuple[int, int], tuple[int, int]] = {}

        def made(frame: Image.Image) -> Image.Image:
            if frame.size not in sizes:
                if sizes:
                    raise MediaError(422, f"{label} changes its frame size; encode it with one size")
                sizes[frame.size] = _size(options, len(indices), frame, label)
            return frame.resize(sizes[frame.size], Image.Resampling(self._processor.resample))

        frames = videos.take(data, label, indices, made, max_pixels=limits.max_pixels)
        frames += frames[-1:] * (-len(frames) % options.temporal_patch)
        return *self._patches(frames, options), clip

    def _patches(self, frames: list[Image.Image], options: VideoOptions) -> tuple[np.ndarray, Grid]:
        """Patches of a video's frames.

        For a single image, the image processor puts ``temporal_patch`` copies of it into each patch. This takes one
        copy from each frame of a step instead.
        """
        found = self._processor(images=frames, do_resize=False, return_tensors="np")
        (_, height, width), depth = found["image_grid_thw"][0], options.temporal_patch
        rows = int(height) * int(width)
        # [steps, frames per step, patches, channels, copies, values per copy]
        each = np.asarray(found["pixel_values"], np.float32).reshape(-1, depth, rows, 3, depth, options.patch**2)
        one_copy = each[:, :, :, :, 0].transpose(0, 2, 3, 1, 4)  # [steps, patches, channels, frames per step, values]
        pixels = np.ascontiguousarray(one_copy).reshape(len(each) * rows, -1)
        return pixels, (len(each), int(height), int(width))


def _size(options: VideoOptions, count: int, frame: Image.Image, label: str) -> tuple[int, int]:
    """Width and height of the resized frames, in Pillow's order. Raises MediaError."""
    width, height = frame.size
    try:
        high, wide = frame_size(options, count, height, width)
    except ValueError:
        raise MediaError(422, f"{label} has frames of {width}x{height} pixels, {_NO_SHAPE}") from None
    return wide, high
