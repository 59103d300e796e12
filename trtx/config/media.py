"""The limits on images and videos that clients send. The command-line options are generated from these fields.

An option's name is the field's name with dashes. Its type, default and bounds come from the field; its help text and
its metavar come from the field's :class:`MediaField`. They are defined nowhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_MIB = 1 << 20
_GIB = 1 << 30
EMBEDDING_CACHE_BYTES = 512 * _MIB
"""The size of the embedding cache of each worker that accepts images. The cache lies on the device of the engine; that
of an encode worker lies in the topology's scratch directory."""

VIDEO_FIELDS = ("max_videos", "max_video_frames", "max_video_s")
"""The fields of :class:`MediaLimits` that apply only to videos: their number, and the limits of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaField:
    """The help text and the metavar of an option; the ``Annotated`` of each :class:`MediaLimits` field has one."""

    help: str  # effect and unit; the default is appended if the field has one
    metavar: str | None = None  # None: a switch


class MediaLimits(BaseModel):
    """The limits on media that a worker accepts from clients. A test in ``tests/unit/media`` exceeds every limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    allowed_media_path: Annotated[
        Path | None,
        MediaField(help="Directory whose files clients may name with file: URLs. Default: none.", metavar="DIR"),
    ] = None
    allow_http_media: Annotated[
        bool, MediaField(help="Fetch media over plain http: too; https: is always allowed.")
    ] = False
    allow_private_media: Annotated[
        bool,
        MediaField(
            help="Fetch media from loopback and private networks too; link-local and special ranges stay refused."
        ),
    ] = False
    max_media_bytes: Annotated[
        int, Field(ge=1, le=4 * _GIB), MediaField(help="Largest file of one medium, in bytes.", metavar="BYTES")
    ] = 32 * _MIB
    max_image_pixels: Annotated[
        int,
        Field(ge=1, le=1 << 30),
        MediaField(
            help="Largest picture, or frame of a video, in pixels; read from its header before anything is decoded.",
            metavar="N",
        ),
    ] = 50_000_000
    max_images: Annotated[
        int, Field(ge=0, le=4096), MediaField(help="Pictures in one request; 0 refuses all.", metavar="N")
    ] = 16
    max_videos: Annotated[
        int, Field(ge=0, le=256), MediaField(help="Videos in one request; 0 refuses all.", metavar="N")
    ] = 2
    max_video_frames: Annotated[
        int,
        Field(ge=2, le=4096),
        MediaField(
            help="Frames that are taken of one video, spread over all of it; shorter ones have fewer.", metavar="N"
        ),
    ] = 32
    max_video_s: Annotated[
        float,
        Field(gt=0, le=86400),
        MediaField(help="Longest video, in seconds of playing; longer ones are refused.", metavar="SECONDS"),
    ] = 600.0
    media_timeout_s: Annotated[
        float,
        Field(gt=0, le=3600),
        MediaField(help="Longest time to fetch one medium, redirects included, in seconds.", metavar="SECONDS"),
    ] = 20.0
    media_idle_s: Annotated[
        float,
        Field(gt=0, le=3600),
        MediaField(help="Longest silence of a server that media are fetched from, in seconds.", metavar="SECONDS"),
    ] = 5.0
    media_memory_bytes: Annotated[
        int,
        Field(ge=1, le=1 << 40),
        MediaField(
            help="Files of all requests that a worker holds at a time, in bytes; more are refused with 429.",
            metavar="BYTES",
        ),
    ] = _GIB
    decode_processes: Annotated[
        int, Field(ge=1, le=256), MediaField(help="Processes of a worker that decode pictures and videos.", metavar="N")
    ] = 2
    decode_queue: Annotated[
        int,
        Field(ge=0, le=65536),
        MediaField(help="Media that may wait for such a process; more are refused with 429.", metavar="N"),
    ] = 128
    decode_timeout_s: Annotated[
        float,
        Field(gt=0, le=3600),
        MediaField(help="Most computing to decode and prepare one medium, in seconds of a core.", metavar="SECONDS"),
    ] = 20.0
    decode_memory_bytes: Annotated[
        int,
        Field(ge=64 * _MIB, le=1 << 40),
        MediaField(help="Memory that decoding may take in each such process, in bytes.", metavar="BYTES"),
    ] = 1536 * _MIB  # enough for 50 million pixels: docs/multimodal.md

    @model_validator(mode="after")
    def _holds_one_file(self) -> Self:
        if self.media_memory_bytes < self.max_media_bytes:
            raise ValueError(
                f"media_memory_bytes is {self.media_memory_bytes}, expected at least {self.max_media_bytes}, what one "
                "file may have (max_media_bytes): raise the one or lower the other"
            )
        return self


@functools.cache
def media_fields() -> Mapping[str, MediaField]:
    """Returns the :class:`MediaField` of each field by field name, in the order of the help page."""
    return {
        name: next(one for one in field.metadata if isinstance(one, MediaField))
        for name, field in MediaLimits.model_fields.items()
    }
