"""The limits on images and videos that clients send. The command-line options are generated from these fields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trtx.config.option_field import OptionField

_MIB = 1 << 20
_GIB = 1 << 30
EMBEDDING_CACHE_BYTES = 512 * _MIB
"""The size of the embedding cache of each worker that accepts images. The cache lies on the device of the engine; that
of an encode worker lies in the topology's scratch directory."""

VIDEO_FIELDS = ("max_videos", "max_video_frames", "max_video_s")
"""The fields of :class:`MediaLimits` that apply only to videos: their number, and the limits of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaField(OptionField):
    """The record of a field of :class:`MediaLimits`."""

    panel: str = "Media"


class MediaLimits(BaseModel):
    """The limits on media that a worker accepts from clients. A test in ``tests/unit/media`` exceeds every limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    allowed_media_path: Annotated[
        Path | None,
        MediaField(help="Directory whose files clients may use in file: URLs. Default: none.", metavar="DIR"),
    ] = None
    allow_http_media: Annotated[bool, MediaField(help="Also fetch media over http:; https: is always allowed.")] = False
    allow_private_media: Annotated[
        bool,
        MediaField(
            help="Also fetch media from loopback and private networks; link-local and special ranges stay refused."
        ),
    ] = False
    max_media_bytes: Annotated[
        int, Field(ge=1, le=4 * _GIB), MediaField(help="Largest file of an image or video, in bytes.", metavar="BYTES")
    ] = 32 * _MIB
    max_image_pixels: Annotated[
        int,
        Field(ge=1, le=1 << 30),
        MediaField(
            help="Largest image or video frame, in pixels, checked in the header before decoding.",
            metavar="N",
        ),
    ] = 50_000_000
    max_images: Annotated[
        int, Field(ge=0, le=4096), MediaField(help="Images per request; 0 refuses all.", metavar="N")
    ] = 16
    max_videos: Annotated[
        int,
        Field(ge=0, le=256),
        MediaField(help="Videos per request; 0 refuses all.", metavar="N", since=7, before=0),
    ] = 2
    max_video_frames: Annotated[
        int,
        Field(ge=2, le=4096),
        MediaField(
            help="Frames to sample from a video, spread evenly; shorter videos have fewer.",
            metavar="N",
            since=7,
            before=32,
        ),
    ] = 32
    max_video_s: Annotated[
        float,
        Field(gt=0, le=86400),
        MediaField(
            help="Longest video, in seconds.",
            metavar="SECONDS",
            since=7,
            before=600.0,
        ),
    ] = 600.0
    media_timeout_s: Annotated[
        float,
        Field(gt=0, le=3600),
        MediaField(help="Time limit to fetch an image or video, with redirects, in seconds.", metavar="SECONDS"),
    ] = 20.0
    media_idle_s: Annotated[
        float,
        Field(gt=0, le=3600),
        MediaField(
            help="Time limit between two reads from the server of an image or video, in seconds.", metavar="SECONDS"
        ),
    ] = 5.0
    media_memory_bytes: Annotated[
        int,
        Field(ge=1, le=1 << 40),
        MediaField(
            help="Total size of the files that a worker holds, in bytes; more are refused with 429.",
            metavar="BYTES",
        ),
    ] = _GIB
    decode_processes: Annotated[
        int, Field(ge=1, le=256), MediaField(help="Processes of a worker that decode images and videos.", metavar="N")
    ] = 2
    decode_queue: Annotated[
        int,
        Field(ge=0, le=65536),
        MediaField(
            help="Images and videos that may wait for a decode process; more are refused with 429.", metavar="N"
        ),
    ] = 128
    decode_timeout_s: Annotated[
        float,
        Field(gt=0, le=3600),
        MediaField(help="CPU time limit to decode and prepare an image or video, in seconds.", metavar="SECONDS"),
    ] = 20.0
    decode_memory_bytes: Annotated[
        int,
        Field(ge=64 * _MIB, le=1 << 40),
        MediaField(help="Memory limit of each decode process, in bytes.", metavar="BYTES"),
    ] = 1536 * _MIB  # enough for 50 million pixels: docs/multimodal.md

    @model_validator(mode="after")
    def _holds_one_file(self) -> Self:
        if self.media_memory_bytes < self.max_media_bytes:
            raise ValueError(
                f"media_memory_bytes is {self.media_memory_bytes}, but one file may have {self.max_media_bytes} bytes "
                "(max_media_bytes); raise it, or lower max_media_bytes"
            )
        return self
