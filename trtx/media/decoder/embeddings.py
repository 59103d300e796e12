"""Reads embeddings that clients computed, from ``.safetensors`` files, which contain no code.

A file contains one tensor of ``[rows, hidden]`` or ``[1, rows, hidden]`` in F32, F16 or BF16, under any name, and for
models with grids ``grid_thw``: three I64, in patches before merging.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from trtx.ipc.encoder_messages import Grid
from trtx.media.errors import MediaError

GRID = "grid_thw"
_HEADER_BYTES = 1 << 16
_MAX_SIDE = 1 << 20


def read(data: bytes | bytearray, label: str, hidden: int) -> tuple[np.ndarray, Grid | None]:
    """The embedding as float32 ``[rows, hidden]``, which represents F16 and BF16 exactly, and the grid.

    Raises MediaError 422, or 415 for another format. Every value is finite, and so is each row's sum of squares: a
    decoder's first norm computes it in float32, and returns zeros for a row where it overflows.
    """
    if len(data) < 8 or not 2 <= int.from_bytes(data[:8], "little") <= min(_HEADER_BYTES, len(data) - 8):
        raise MediaError(415, f"{label} is no .safetensors file, or one with a header above {_HEADER_BYTES} bytes")
    try:
        tensors: dict[str, Any] = dict(deserialize(bytes(data)))  # type: ignore[no-untyped-call]
    except (SafetensorError, ValueError):
        raise MediaError(422, f"{label} is a broken .safetensors file; write it with safetensors anew") from None
    stated = tensors.pop(GRID, None)
    grid = None if stated is None else _grid(stated, label)
    if len(tensors) != 1:
        raise MediaError(422, f"{label} holds {len(tensors)} tensors beside {GRID}; expected one embedding")
    return _rows(next(iter(tensors.values())), label, hidden), grid


def made(rows: np.ndarray, dtype: str, label: str) -> np.ndarray:
    """float32 ``rows`` rounded to ``dtype``; bfloat16 is returned as uint16 bits.

    Raises MediaError 422 for an overflow.
    """
    if dtype == "float32":
        return rows
    if dtype == "bfloat16":  # no overflow: bfloat16 has float32's exponents
        bits = rows.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)  # round to nearest, ties to even
    assert dtype == "float16", f"no model computes in {dtype}"
    with np.errstate(over="ignore"):
        rounded = rows.astype(np.float16)
    if not np.isfinite(rounded).all():
        raise MediaError(422, f"{label} holds values outside the range of {dtype}, the dtype of this model")
    return rounded


def _grid(stated: Any, label: str) -> Grid:
    values = np.frombuffer(stated["data"], np.int64).tolist() if stated["dtype"] == "I64" else []
    if len(values) != 3 or not all(0 < value <= _MAX_SIDE for value in values):
        raise MediaError(422, f"{label} has a {GRID} that is invalid; expected three positive I64")
    time, height, width = values
    return time, height, width


def _rows(stated: Any, label: str, hidden: int) -> np.ndarray:
    shape = list(stated["shape"])
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 2 or shape[0] < 1 or shape[1] != hidden:
        raise MediaError(
            422,
            f"{label} holds a tensor of shape {_shown(stated['shape'])}; this model expects [rows, {hidden}], or "
            f"[1, rows, {hidden}]",
        )
    if stated["dtype"] == "F32":
        rows = np.frombuffer(stated["data"], np.float32)
    elif stated["dtype"] == "F16":
        rows = np.frombuffer(stated["data"], np.float16).astype(np.float32)
    elif stated["dtype"] == "BF16":
        rows = (np.frombuffer(stated["data"], np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        raise MediaError(422, f"{label} holds {stated['dtype']}; expected F32, F16 or BF16")
    if not np.isfinite(rows).all():
        raise MediaError(422, f"{label} holds values that are not finite")
    rows = rows.reshape(shape)
    with np.errstate(over="ignore"):
        squares = np.einsum("ij,ij->i", rows, rows)
    if not np.isfinite(squares).all():
        raise MediaError(
            422,
            f"{label} holds values up to {np.abs(rows).max():.1e}, whose squares are beyond float32, in which this "
            "model's norms compute; send what its own encoder makes",
        )
    return rows


def _shown(shape: list[int]) -> str:
    return f"[{', '.join(map(str, shape[:4]))}{', ...' if len(shape) > 4 else ''}]"
