"""Checks whether workers on this machine can decode videos, if their model takes videos."""

from __future__ import annotations

from pathlib import Path

from trtx.checkpoint.vision import read_vision_config
from trtx.config.media import VIDEO_FIELDS, MediaLimits
from trtx.config.video_decoder import INSTALL, NO_DECODER, decodes_videos
from trtx.errors import UsageError


def video_warnings(engine: str, model_path: Path, media: MediaLimits | None = None) -> tuple[str, ...]:
    """A warning that videos are refused, if the model takes them and PyAV is not installed.

    Raises UsageError if ``media`` sets a video limit and PyAV is not installed. ``media`` None: the share of a plan
    over several hosts, whose limits were checked on the host that made the plan.
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
