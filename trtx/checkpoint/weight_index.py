"""Which safetensors files hold a checkpoint's weights."""

from __future__ import annotations

from pathlib import Path

from trtx.checkpoint.documents import read_object
from trtx.errors import UsageError

INDEX = "model.safetensors.index.json"


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
