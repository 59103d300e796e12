"""What the two ends of the encoder's socket say to each other, as msgspec structs. Nothing here does anything."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from trtx.ipc.shared_tensor import SharedTensor

DEFAULT_MAX_NUM_TOKENS = 16384
"""Rows of one batch: TensorRT-LLM's, of its ``MultimodalEncoder``. 28 pictures of LLaVA 1.5; the largest of Qwen."""

ARENA_BYTES = 512 << 20
"""Of a GPU, for embeddings that stay until an engine of the same host has copied them: an encode worker's cache."""

Grid = tuple[int, int, int]
"""Of a picture or a video: time, height, width."""


class Clip(msgspec.Struct, frozen=True, array_like=True):
    """When the steps of a video's grid are: one entry of ``at_s`` for each, seconds from the beginning, the middle of
    the frames that it holds. ``step_s``: seconds from one to the next, by the rate at which frames were taken."""

    step_s: float
    at_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderArgs:
    """Resolved. ``model`` is a directory; ``dtype`` "auto" is the decoder's, which the encoder's process finds out."""

    model: str
    dtype: str = "auto"
    max_batch_size: int = 256  # items of one batch
    max_num_tokens: int = DEFAULT_MAX_NUM_TOKENS  # rows of one batch, and of one item
    arena_bytes: int = 0  # of a GPU, for embeddings that stay there; 0, or no GPU: all go through files


# --- to the encoder ---


class Start(msgspec.Struct, frozen=True, tag="start", array_like=True):
    """The first message, once."""

    args: EncoderArgs


class Encode(msgspec.Struct, frozen=True, tag="encode", array_like=True, omit_defaults=True):
    """One item. ``pixels``: float32, as the checkpoint's own image processor gives them for one picture; the file has
    to stay until the answer. ``grid``: in patches, of models whose pictures vary in size. ``on_device``: its rows may
    stay on the encoder's GPU, where there is room."""

    item_id: int
    pixels: SharedTensor
    grid: Grid | None = None
    on_device: bool = False


class Cancel(msgspec.Struct, frozen=True, tag="cancel", array_like=True):
    """Items that wait are dropped; of others the answer comes all the same. No item is without an answer."""

    item_ids: list[int]


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", array_like=True):
    pass


# --- from the encoder ---


class Progress(msgspec.Struct, frozen=True, tag="progress", array_like=True):
    text: str


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    width: int  # columns of an embedding: the decoder's, times 1 + the levels of deepstack
    dtype: str  # of an embedding
    device_memory_bytes: int


class Fatal(msgspec.Struct, frozen=True, tag="fatal", array_like=True):
    text: str
    is_usage: bool = False  # the caller's arguments are at fault, and text is for a person


class Encoded(msgspec.Struct, frozen=True, tag="encoded", array_like=True, omit_defaults=True):
    """An item's end. Its file is from then on the receiver's to remove."""

    item_id: int
    rows: SharedTensor | None = None  # [rows, width]
    grid: Grid | None = None  # in merged patches, one a row; None where the model has none
    error: str | None = None
    is_failure: bool = False  # the error is not the item's own: RequestFailed


class EncoderStats(msgspec.Struct, frozen=True, tag="stats", array_like=True):
    """After each batch: totals since the start."""

    batches: int
    items: int
    rows: int
    seconds: float  # of computing
    device_memory_bytes: int


ToEncoder = Start | Encode | Cancel | Shutdown
FromEncoder = Progress | Ready | Fatal | Encoded | EncoderStats

# The first use of these types happens here, in the one thread that imports: see llm_args.
msgspec.msgpack.Decoder(ToEncoder)
msgspec.msgpack.Decoder(FromEncoder)
