"""Tensors of one process for one other, under handles that are plain JSON."""

from __future__ import annotations

import base64
import itertools
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tensorrt_llm._facts import public

_CPU_METHOD = 2  # the real registry's key of handles in CPU shared memory
_storage_ids = itertools.count(1)


@cache
def _storage() -> TemporaryDirectory[str]:
    """Where tensors lie for other processes; gone with this one."""
    return TemporaryDirectory(prefix="tensorrt_llm-standin-")


@public
class SharedTensorContainer:
    """A tensor in a file. One consumer a handle: it frees the storage."""

    def __init__(self, method_key: int, tensor_handle: Any) -> None:
        self._method_key = method_key
        self._tensor_handle = tensor_handle

    @classmethod
    def from_tensor(cls, tensor: Any) -> SharedTensorContainer:
        import torch

        data = tensor.contiguous().cpu().flatten().view(torch.uint8).numpy()
        path = Path(_storage().name) / f"{next(_storage_ids)}"
        path.write_bytes(data.tobytes())
        handle = {
            "tensor_storage_offset": 0,
            "tensor_size": list(tensor.shape),
            "tensor_stride": list(tensor.contiguous().stride()),
            "manager_handle": "",
            "storage_handle": base64.b64encode(bytes(path)).decode(),
            "storage_size": data.nbytes,
            "storage_dtype": str(tensor.dtype),
        }
        return cls(_CPU_METHOD, handle)

    def dump_to_dict(self) -> dict[str, Any]:
        return {**self._tensor_handle, "method_key": self._method_key}

    @classmethod
    def from_dict(cls, tensor_info: dict[str, Any]) -> SharedTensorContainer:
        if tensor_info["method_key"] != _CPU_METHOD:
            raise ValueError(f"Unsupported shared tensor method key: {tensor_info['method_key']}")
        return cls(_CPU_METHOD, {name: tensor_info[name] for name in _HANDLE_FIELDS})

    def get_local_view(self) -> Any:
        import torch

        handle = self._tensor_handle
        path = Path(base64.b64decode(handle["storage_handle"]).decode())
        data = bytearray(path.read_bytes())
        path.unlink()
        dtype = getattr(torch, handle["storage_dtype"].removeprefix("torch."))
        return torch.frombuffer(data, dtype=dtype).reshape(handle["tensor_size"])


_HANDLE_FIELDS = (
    "tensor_storage_offset",
    "tensor_size",
    "tensor_stride",
    "manager_handle",
    "storage_handle",
    "storage_size",
    "storage_dtype",
)
