"""Messages between the caller's process and the encoder's process, as msgspec structs. No logic here."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from trtx.ipc.child_messages import Fatal, Progress, Shutdown
from trtx.ipc.shared_tensor import SharedTensor

DEFAULT_MAX_NUM_TOKENS = 16384
"""Rows of one batch, as in TensorRT-LLM's ``MultimodalEncoder``: 28 images of LLaVA 1.5, or Qwen's largest one."""

ARENA_BYTES = 512 << 20
"""GPU memory for embeddings that stay until a local engine has copied them: the cache of an encode worker."""

Grid = tuple[int, int, int]
"""Time, height and width of an image or a video."""


class Clip(msgspec.Struct, frozen=True, array_like=True):
    """Times of the steps of a video's grid.

    ``at_s``: one entry for each step, in seconds from the start: the middle of the frames in the step. ``step_s``:
    seconds between steps, from the rate at which frames were sampled.
    """

    step_s: float
    at_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderArgs:
    """Resolved arguments.

    ``model`` is a directory; the encoder's process resolves ``dtype`` "auto" to the decoder's dtype.
    """

    model: str
    dtype: str = "auto"
    max_batch_size: int = 256  # items of one batch
    max_num_tokens: int = DEFAULT_MAX_NUM_TOKENS  # rows of one batch, and of one item
    arena_bytes: int = 0  # GPU memory for embeddings that stay there; 0, or without a GPU: all go through files


# --- to the encoder ---


class EncoderStart(msgspec.Struct, frozen=True, tag="start", array_like=True):
    """The first message, sent once."""

    args: EncoderArgs


class Encode(msgspec.Struct, frozen=True, tag="encode", array_like=True, omit_defaults=True):
    """Encodes one item.

    ``pixels``: float32, as the checkpoint's own image processor gives them for one image; the file must stay until the
    answer. ``grid``: in patches, for models whose images vary in size. ``on_device``: the rows may stay on the
    encoder's GPU, if it has room.
    """

    item_id: int
    pixels: SharedTensor
    grid: Grid | None = None
    on_device: bool = False


class Cancel(msgspec.Struct, frozen=True, tag="cancel", array_like=True):
    """Drops items that are still waiting. Every item gets an answer, dropped or not."""

    item_ids: list[int]


# --- from the encoder ---


class EncoderReady(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    width: int  # columns of an embedding: the decoder's hidden size times 1 + the deepstack levels
    dtype: str  # of an embedding
    device_memory_bytes: int


class Encoded(msgspec.Struct, frozen=True, tag="encoded", array_like=True, omit_defaults=True):
    """The answer for one item. From now on, the receiver must remove its file."""

    item_id: int
    rows: SharedTensor | None = None  # [rows, width]
    grid: Grid | None = None  # in merged patches, one for each row; None for models without grids
    error: str | None = None
    is_failure: bool = False  # the item did not cause the error: RequestFailed


class EncoderStats(msgspec.Struct, frozen=True, tag="stats", array_like=True):
    """Totals since the start, sent after each batch."""

    batches: int
    items: int
    rows: int
    seconds: float  # of computing
    device_memory_bytes: int


ToEncoder = EncoderStart | Encode | Cancel | Shutdown
FromEncoder = Progress | EncoderReady | Fatal | Encoded | EncoderStats

# The first use of these types happens here, in the importing thread: see llm_args.
msgspec.msgpack.Decoder(ToEncoder)
msgspec.msgpack.Decoder(FromEncoder)
