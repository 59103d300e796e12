"""``MultimodalEncoder`` and the handles that it gives out.

There is no vision model here: an image becomes ``TOKENS_PER_IMAGE`` vectors through a fixed projection of its pixels,
so that equal images give equal embeddings and different ones differ. What is real is the shape of everything around.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tensorrt_llm._facts import follows, public
from tensorrt_llm._impl.disagg import DisaggregatedParams
from tensorrt_llm._impl.llm import BaseLLM
from tensorrt_llm._impl.results import Feed, RequestOutput, request_output
from tensorrt_llm._impl.sampling import SamplingParams

TOKENS_PER_IMAGE = 4
_SIDE = 16  # pixels of the square that every image is scaled to
_NO_ENCODER = ("Llama4ForConditionalGeneration",)
_MAX_NUM_TOKENS = 16384
_CPU_METHOD = 2  # the real registry's key of handles in CPU shared memory
_storage_ids = itertools.count(1)


@cache
def _storage() -> TemporaryDirectory[str]:
    """Where tensors lie for other processes; gone with this one."""
    return TemporaryDirectory(prefix="tensorrt_llm-standin-")


@public
class SharedTensorContainer:
    """A float32 tensor in a file, under a handle that is plain JSON. One consumer a handle: it frees the storage."""

    def __init__(self, method_key: int, tensor_handle: Any) -> None:
        self._method_key = method_key
        self._tensor_handle = tensor_handle

    @classmethod
    def from_tensor(cls, tensor: Any) -> SharedTensorContainer:
        data = tensor.float().contiguous().cpu().numpy()
        path = Path(_storage().name) / f"{next(_storage_ids)}"
        path.write_bytes(data.tobytes())
        handle = {
            "tensor_storage_offset": 0,
            "tensor_size": list(tensor.shape),
            "tensor_stride": list(tensor.contiguous().stride()),
            "manager_handle": "",
            "storage_handle": base64.b64encode(bytes(path)).decode(),
            "storage_size": data.nbytes,
            "storage_dtype": "torch.float32",
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
        return torch.frombuffer(data, dtype=torch.float32).reshape(handle["tensor_size"])


_HANDLE_FIELDS = (
    "tensor_storage_offset",
    "tensor_size",
    "tensor_stride",
    "manager_handle",
    "storage_handle",
    "storage_size",
    "storage_dtype",
)


@dataclass(slots=True)
class _Encoded:
    """What a request of the torch engine looks like, for one that is over already."""

    request_id: int
    prompt_token_ids: list[int]
    outputs: list[Any] = field(default_factory=list)
    finished: bool = True

    def result(self, timeout: float | None) -> None: ...

    async def __anext__(self) -> None: ...

    def abort(self) -> None: ...


@public
class MultimodalEncoder(BaseLLM):
    """The vision part of a model alone (tensorrt_llm/llmapi/mm_encoder.py)."""

    @follows("MultimodalEncoder.__init__")
    def __init__(self, model: Any, **given: Any) -> None:
        if given.get("max_num_tokens") is None:
            given["max_num_tokens"] = _MAX_NUM_TOKENS
        super().__init__(model, **given)

    def _build_model(self) -> None:
        config = json.loads((Path(self.args.model) / "config.json").read_text(encoding="utf-8"))
        for architecture in config.get("architectures") or ():
            if architecture in _NO_ENCODER:
                raise ValueError(f"{architecture} has no standalone multimodal encoder")
        if self.args.max_batch_size is None:
            raise TypeError("'>' not supported between instances of 'NoneType' and 'int'")  # the real one's crash
        self.args.mm_encoder_only = True
        self._hidden_size = (config.get("text_config") or config)["hidden_size"]
        self._ids = itertools.count(1)
        self._is_open = True

    def generate(self, inputs: Any, **_: Any) -> Any:
        is_one = not isinstance(inputs, list)
        outputs = [self.generate_async(item) for item in ([inputs] if is_one else inputs)]
        return outputs[0] if is_one else outputs

    def generate_async(self, inputs: Any, **_: Any) -> RequestOutput:
        if not self._is_open:
            raise RuntimeError("LLM is shutting down")
        if not isinstance(inputs, dict) or ("prompt" not in inputs and "prompt_token_ids" not in inputs):
            raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
        images = (inputs.get("multi_modal_data") or {}).get("image") or []
        images = images if isinstance(images, list) else [images]
        pixels = [_pixels(image) for image in images]
        params = DisaggregatedParams(
            multimodal_embedding_handles=[self._handle(image) for image in pixels],
            multimodal_hashes=[_hash(image) for image in pixels],
        )
        inner = _Encoded(next(self._ids), list(inputs.get("prompt_token_ids") or ()))
        output = request_output(
            Feed(
                inner=inner,
                sampling=SamplingParams(),
                streaming=False,
                prompt=inputs.get("prompt"),
                disaggregated_params=params if images else None,
                stop_words=[],
                decode=None,
                fail=lambda error: error,
                seen=lambda: None,
            )
        )
        output._done = True
        output._outputs[0].finish_reason = "length"
        output._outputs[0].disaggregated_params = output.disaggregated_params
        return output

    def shutdown(self) -> None:
        self._is_open = False

    def _check_health(self) -> bool:
        return self._is_open

    def _handle(self, pixels: bytes) -> dict[str, Any]:
        import torch

        rows = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).float().reshape(TOKENS_PER_IMAGE, -1) / 255
        projection = torch.randn(rows.shape[1], self._hidden_size, generator=torch.Generator().manual_seed(0))
        return SharedTensorContainer.from_tensor(rows @ projection).dump_to_dict()


def _pixels(image: Any) -> bytes:
    """RGB bytes of an image scaled to 16 by 16. ``image``: a PIL image."""
    return image.convert("RGB").resize((_SIDE, _SIDE)).tobytes()


def _hash(pixels: bytes) -> list[int]:
    """Eight 32-bit words of a 256-bit hash."""
    digest = hashlib.blake2b(pixels, digest_size=32).digest()
    return [int.from_bytes(digest[at : at + 4], "big", signed=True) for at in range(0, 32, 4)]
