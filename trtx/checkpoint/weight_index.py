"""Which safetensors files hold a checkpoint's weights, and what their headers say. No tensor is read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from trtx.checkpoint.documents import read_object
from trtx.errors import UsageError

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 256 << 20  # the format allows 100 MB; anything longer is no header
_WIDE = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def weight_files(directory: Path) -> list[Path]:
    """Those that the index names, there or not, where there is one: others beside them may hold the same weights again.

    Else all of the directory; none where weights are drawn. Raises UsageError for an index that is none.
    """
    index = directory / INDEX
    if not index.exists():
        return sorted(directory.glob("*.safetensors"))
    listed = read_object(index, "a safetensors index").get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) and name for name in listed.values()):
        raise UsageError(
            f"{index} is no safetensors index: no weight_map from tensors to files; download the checkpoint again"
        )
    return [directory / name for name in sorted(set(listed.values()))]


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Each tensor's ``dtype``, ``shape`` and ``data_offsets`` by its name. Raises UsageError for a file that is none.

    The file begins with the header's length, 8 bytes little-endian, then JSON.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for entry in header.values():
            begin, end = entry["data_offsets"]
            if not (isinstance(begin, int) and isinstance(end, int) and isinstance(entry["dtype"], str)):
                raise ValueError("a tensor without dtype or offsets")
    except (OSError, ValueError, struct.error, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path} can't be read as safetensors ({str(error)[:200]}); download it again") from error
    return dict(header)


def stored_dtype(directory: Path) -> str:
    """float32, bfloat16 or float16: as the first tensor of such a kind is stored, bfloat16 where there is none.

    What a config that names no dtype means, for the plan and the engine alike; transformers 5 looks there too.
    """
    for path in weight_files(directory):
        if path.is_file():
            kinds = (_WIDE.get(entry["dtype"]) for entry in read_header(path).values())
            if (found := next(filter(None, kinds), None)) is not None:
                return found
    return "bfloat16"
