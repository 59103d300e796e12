"""What an engine tells others about its weights, and how their tensors are placed over the same memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from trtx.torch_engine.runner.weight_tensors import named_weights
from trtx.torch_engine.runner.weights import DecoderWeights


class PlacedTensor(msgspec.Struct, frozen=True, array_like=True):
    """The place of a tensor in a region. ``offset`` is in bytes, ``stride`` in elements."""

    region: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def fits(self, region_bytes: int) -> bool:
        """Whether the tensor lies within a region of this size."""
        width = _dtype(self.dtype).itemsize
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return self.offset >= 0 and self.offset % width == 0 and self.offset + (last + 1) * width <= region_bytes


class WeightOffer(msgspec.Struct, frozen=True, tag="weights", array_like=True):
    """The weights of one engine.

    ``made_from``: what decides about their values and their device, by its name in messages. ``region_bytes``: the
    sizes of the regions, in the order of their descriptors. ``tensors``: by the names of
    :func:`~trtx.torch_engine.runner.weight_tensors.named_weights`.
    """

    made_from: dict[str, str]
    region_bytes: tuple[int, ...]
    tensors: dict[str, PlacedTensor]

    def mismatch(self, made_from: Mapping[str, str], expected: DecoderWeights) -> str | None:
        """Returns a clause that says why these are not the weights ``expected``, on the device ``meta``; or None."""
        for name in sorted(self.made_from.keys() | made_from.keys()):
            ours, theirs = made_from.get(name, "–"), self.made_from.get(name, "–")
            if ours != theirs:
                return f"its {name} is {theirs}, and {ours} here"
        tensors = named_weights(expected)
        for name in sorted(self.tensors.keys() | tensors.keys()):
            wanted, found = tensors.get(name), self.tensors.get(name)
            if wanted is None or found is None or not _has_form(wanted, found):
                return f"its {name} is {_found_form(found)}, and {_wanted_form(wanted)} here"
            if not 0 <= found.region < len(self.region_bytes) or not found.fits(self.region_bytes[found.region]):
                return f"its {name} lies outside its memory"
        return None

    def place(self, expected: DecoderWeights, regions: Sequence[Tensor]) -> None:
        """Makes the tensors of ``expected`` views of ``regions``, uint8 tensors in the order of the descriptors."""
        for name, tensor in named_weights(expected).items():
            found = self.tensors[name]
            dtype, region = _dtype(found.dtype), regions[found.region]
            view = torch.empty(0, dtype=dtype, device=region.device)
            view.set_(region.untyped_storage(), found.offset // dtype.itemsize, found.shape, found.stride)
            # All objects that hold the tensor get the memory.
            torch.utils.swap_tensors(tensor, view)  # type: ignore[no-untyped-call]


def placed(tensor: Tensor, region: int, begin: int) -> PlacedTensor:
    """Returns the place of ``tensor`` in the region whose first byte is at the address ``begin``."""
    return PlacedTensor(
        region, tensor.data_ptr() - begin, _name(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride())
    )


def _has_form(wanted: Tensor, found: PlacedTensor) -> bool:
    steps = found.stride
    if found.dtype != _name(wanted.dtype) or len(steps) != len(found.shape) or any(step < 0 for step in steps):
        return False
    return found.shape == tuple(wanted.shape) or (found.shape == () and wanted.dim() == 2 and wanted.shape[0] == 1)


def _wanted_form(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{_name(tensor.dtype)} {list(tensor.shape)}"


def _found_form(tensor: PlacedTensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
