"""Between a pool and one of its processes: a length, msgpack, and behind some messages as many bytes as they say.

Down: ``Setup`` once, then one ``Job`` after the answer to the one before. Up: ``Ready`` or ``Unusable`` once; ``Taken``
for each job as soon as it is there, then its answer.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from trtx.ipc.encoder_messages import Clip, Grid
from trtx.ipc.shared_tensor import SharedTensor
from trtx.media.errors import Status

LENGTH = struct.Struct("<I")
Work = Literal["pixels", "patches", "frames", "rgb", "embedding"]


VideoRule = Literal["each", "all"]
"""Whether a model's processor counts the pixels of each frame of a video (Qwen2.5-VL) or of all together (Qwen3-VL)."""


class Setup(msgspec.Struct, frozen=True, tag=True):
    """What a process is for."""

    model_dir: str | None  # None: no "pixels", "patches" or "frames"
    videos: VideoRule | None  # None: no "frames"
    directory: str  # of shared tensors
    max_pixels: int  # of a picture, or of one frame
    max_frames: int  # that are taken of a video
    max_video_s: float
    memory_bytes: int  # beyond what it has when it is ready
    is_replacement: bool = False  # of a process that a file may have ended


class Job(msgspec.Struct, frozen=True, tag=True):
    """``size`` bytes of a file follow."""

    work: Work
    label: str
    size: int
    hidden: int = 0  # columns that an embedding must have
    dtype: str = "float32"  # that it is made


class Ready(msgspec.Struct, frozen=True, tag=True):
    """It can take jobs."""


class Unusable(msgspec.Struct, frozen=True, tag=True):
    """It can't, and neither could another: one sentence."""

    text: str


class Taken(msgspec.Struct, frozen=True, tag=True):
    """All bytes of a job have arrived: from here on what happens is this file's fault."""


class Tensor(msgspec.Struct, frozen=True, tag=True):
    """Of "pixels" and "frames": float32; of "embedding" what was asked for. ``clip``: of "frames" alone."""

    tensor: SharedTensor
    grid: Grid | None
    clip: Clip | None = None


class Rgb(msgspec.Struct, frozen=True, tag=True):
    """``height * width * 3`` bytes follow."""

    height: int
    width: int


class Patches(msgspec.Struct, frozen=True, tag=True):
    """Of "patches": how many "pixels" would be cut into. None: known only once it is done."""

    count: int | None


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A :class:`~trtx.media.errors.MediaError`."""

    status: Status
    text: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The fault is this machine's, not the file's: one sentence."""

    text: str


Down = Setup | Job
Answer = Tensor | Patches | Rgb | Refused | Failed
Up = Ready | Unusable | Taken | Answer

_ENCODER = msgspec.msgpack.Encoder()


def frame(message: Down | Up) -> bytes:
    body = _ENCODER.encode(message)
    return LENGTH.pack(len(body)) + body
