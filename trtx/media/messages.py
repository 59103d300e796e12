"""Messages between a pool and a decoding process: length, msgpack, and for some messages raw bytes.

To the process: ``Setup`` once, then ``MediaJob``, each after the previous answer. From the process: ``DecoderReady`` or
``Unusable`` once; for each job ``Taken`` as soon as it has been received, then its answer. Messages with raw bytes
state their number.
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
"""Whether a model's processor limits the pixels of each frame of a video (Qwen2.5-VL) or of all together (Qwen3-VL)."""


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message to a decode process: its limits and the model whose images it prepares."""

    model_dir: str | None  # None: no "pixels", "patches" or "frames"
    videos: VideoRule | None  # None: no "frames"
    directory: str  # directory of shared tensors
    max_pixels: int  # of an image, or of one frame
    max_frames: int  # used of a video
    max_video_s: float
    memory_bytes: int  # in addition to its memory when it is ready
    is_replacement: bool = False  # replaces a process that a file may have crashed


class MediaJob(msgspec.Struct, frozen=True, tag=True):
    """A file to process; ``size`` bytes follow."""

    work: Work
    label: str
    size: int
    hidden: int = 0  # required number of columns of an embedding
    dtype: str = "float32"  # dtype of the result


class DecoderReady(msgspec.Struct, frozen=True, tag=True):
    """The process can take jobs."""


class Unusable(msgspec.Struct, frozen=True, tag=True):
    """Neither this process nor another one could take jobs; ``text`` is one sentence with the reason."""

    text: str


class Taken(msgspec.Struct, frozen=True, tag=True):
    """All bytes of the job have arrived. Whatever happens from now on is attributed to this file."""


class Tensor(msgspec.Struct, frozen=True, tag=True):
    """The answer to "pixels" and "frames" (float32) and "embedding" (the requested dtype).

    ``clip``: for "frames" only.
    """

    tensor: SharedTensor
    grid: Grid | None
    clip: Clip | None = None


class Rgb(msgspec.Struct, frozen=True, tag=True):
    """The answer to "rgb"; ``height * width * 3`` bytes follow."""

    height: int
    width: int


class Patches(msgspec.Struct, frozen=True, tag=True):
    """The answer to "patches": the number of patches that "pixels" would produce; None: unknown in advance."""

    count: int | None


class MediaRefused(msgspec.Struct, frozen=True, tag=True):
    """The fields of a :class:`~trtx.media.errors.MediaError`."""

    status: Status
    text: str


class DecodeFailed(msgspec.Struct, frozen=True, tag=True):
    """A failure of this machine, not of the file; ``text`` is one sentence."""

    text: str


Down = Setup | MediaJob
Answer = Tensor | Patches | Rgb | MediaRefused | DecodeFailed
Up = DecoderReady | Unusable | Taken | Answer

_ENCODER = msgspec.msgpack.Encoder()


def frame(message: Down | Up) -> bytes:
    body = _ENCODER.encode(message)
    return LENGTH.pack(len(body)) + body
