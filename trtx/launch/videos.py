"""Checks whether this machine's workers can decode the videos that their model takes."""

from __future__ import annotations

from pathlib import Path

from trtx.checkpoint.vision import read_vision_config
from trtx.config.media import VIDEO_FIELDS, MediaLimits
from trtx.config.video_decoder import INSTALL, NO_DECODER, decodes_videos
from trtx.errors import UsageError


def video_warnings(engine: str, model_path: Path, media: MediaLimits | None = None) -> tuple[str, ...]:
    """A warning that videos are refused, if the model takes them and PyAV is not installed.

    ``media`` None: the limits of a plan over hosts, which were checked where the plan was made. Raises UsageError if a
    video limit was set although no decoder is installed here.
    """
    if engine != "torch" or decodes_videos() or (media is not None and media.max_videos == 0):
        return ()
    vision = read_vision_config(model_path)
    if vision is None or vision.video_token_id is None:
        return ()
    stated = {} if media is None else media.model_dump(exclude_defaults=True)
    for field in VIDEO_FIELDS:
        if field in stated:
            raise UsageError(
                f"--{field.replace('_', '-')} has no effect without PyAV, which decodes videos and is not installed "
                f"here; install it with {INSTALL}, or leave the option out"
            )
    return (f"requests with videos are refused: {NO_DECODER}",)
