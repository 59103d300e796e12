"""Writes the tensors of a golden file, and lists them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    found = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(found, path)
    path.chmod(0o644)
    for name, tensor in found.items():
        print(name, tensor.dtype, list(tensor.shape))
    print(f"{path}: {path.stat().st_size} bytes")
