"""The memory of a runner that can be released while the engine sleeps: the KV pool and the weights.

A sleeping engine keeps its process, its CUDA graphs and its sampling state. The memory that it releases lies in
regions, so the graphs find everything at its old address after :meth:`RunnerMemory.restore`.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from trtx.errors import UsageError
from trtx.torch_engine.messages import MemoryTag
from trtx.torch_engine.runner.cuda_regions import OutOfDeviceMemory
from trtx.torch_engine.runner.regions import Region, open_region
from trtx.torch_engine.runner.shared_weights import SharedWeights
from trtx.torch_engine.runner.weight_tensors import named_weights
from trtx.torch_engine.runner.weights import DecoderWeights

_REGION_BYTES = 512 << 20
"""Size of a region of weights: what a device needs twice while the weights move into their regions."""
_ALIGNMENT = 256

ReadWeights = Callable[[Path], DecoderWeights]
"""Reads a checkpoint's weights into host memory, as the runner's device has them. Raises UsageError."""


@dataclass(frozen=True, slots=True)
class NewWeights:
    """A checkpoint's weights in host memory, which fit the loaded ones."""

    model_dir: Path
    values: dict[str, Tensor]  # by the names of the loaded ones


class WeightMemory:
    """A decoder's weights, with the source from which they are restored and updated."""

    def __init__(
        self, weights: DecoderWeights, model_dir: Path, read: ReadWeights, shared: SharedWeights | None = None
    ) -> None:
        """``shared``: the memory that this engine shares with others; it belongs to this object then."""
        self.weights = weights
        self.shared = shared
        self._tensors = named_weights(weights)
        self._device = weights.embedding.device
        self._source = model_dir
        self._read = read
        self._regions: list[Region] = []
        self._region_of: dict[str, int] = {}
        self._copy: _HostCopy | None = None
        self._keeps_copy = False
        self.is_released = False

    def move_to_regions(self, *, keeps_copy: bool = False) -> None:
        """Moves the weights into regions, so that their memory can be released, or mapped by other engines.

        ``keeps_copy``: weights are restored from a copy in host memory, which the first :meth:`release` makes and which
        is pinned on a GPU; without it, from the checkpoint.
        """
        self._keeps_copy = keeps_copy
        aliases: dict[int, list[str]] = {}  # a weight and its transpose share their storage
        for name, tensor in self._tensors.items():
            aliases.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
        group: list[list[str]] = []
        size = index = 0
        for names in aliases.values():
            num_bytes = _aligned(self._tensors[names[0]].untyped_storage().nbytes())
            if group and size + num_bytes > _REGION_BYTES:
                self._fill_region(index, group, size)
                group, size, index = [], 0, index + 1
            group.append(names)
            size += num_bytes
        self._fill_region(index, group, size)

    def _new_region(self, num_bytes: int) -> Tensor:
        if self.shared is not None:
            return self.shared.new_region(num_bytes, self._device).bytes
        self._regions.append(region := open_region(num_bytes, self._device))
        return region.bytes

    def _fill_region(self, index: int, group: list[list[str]], num_bytes: int) -> None:
        contents = self._new_region(num_bytes)
        begin, target = 0, contents.untyped_storage()
        for names in group:
            source = self._tensors[names[0]].untyped_storage()
            count = source.nbytes()
            whole = torch.empty(0, dtype=torch.uint8, device=self._device).set_(source, 0, (count,), (1,))
            contents[begin : begin + count].copy_(whole)
            for name in names:
                tensor = self._tensors[name]
                offset = begin // tensor.element_size() + tensor.storage_offset()
                tensor.set_(target, offset, tensor.shape, tensor.stride())
                self._region_of[name] = index
            begin += _aligned(count)
        del source, whole
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def release(self) -> None:
        if self._keeps_copy:
            if self._copy is None:
                self._copy = _HostCopy([region.bytes for region in self._regions])
            self._copy.save([region.bytes for region in self._regions])
        for region in self._regions:
            region.release()
        self.is_released = True

    def restore(self) -> None:
        """Restores the weights.

        Raises UsageError if the checkpoint can't be read any more, or OutOfDeviceMemory; the weights stay released.
        """
        read = None if self._copy is not None else self._read_same(self._source)
        try:
            for region in self._regions:
                region.restore()
        except BaseException:
            for region in self._regions:
                region.release()
            raise
        if self._copy is not None:
            self._copy.load([region.bytes for region in self._regions])
        elif read is not None:
            self._write(read)
        self.is_released = False

    def read(self, model_dir: Path) -> NewWeights:
        """Reads a checkpoint of the same config.

        Raises UsageError for any other checkpoint and for values that are not finite.
        """
        if self.shared is not None:
            raise UsageError(
                "the weights are shared with other engines, which would answer with the new ones too; start the "
                f"topology with {model_dir}, or without --share-weights"
            )
        values = self._read_same(model_dir)
        if (wrong := next((name for name, value in values.items() if not _is_finite(value)), None)) is not None:
            raise UsageError(
                f"the weights of {model_dir} can't be used: {wrong} has values that are infinite or not a number; give "
                "a checkpoint without such values"
            )
        return NewWeights(model_dir, values)

    def replace(self, new: NewWeights) -> None:
        """Replaces the values. Released weights stay released."""
        if not self.is_released:
            self._write(new.values)
            if self._copy is not None:
                self._copy.is_current = False
        elif self._copy is not None:
            for name, value in new.values.items():
                self._copy.view(self._region_of[name], self._tensors[name]).copy_(value)
        self._source = new.model_dir

    def close(self) -> None:
        if self.shared is not None:
            self.shared.close()
        if self._copy is not None:
            self._copy.close()
        for region in self._regions:
            region.close()

    def serve(self) -> None:
        """Offers shared weights to the other engines of the group. Call it once the runner is complete."""
        if self.shared is not None:
            self.shared.serve(self._tensors, self._region_of)

    def _read_same(self, model_dir: Path) -> dict[str, Tensor]:
        read = named_weights(self._read(model_dir))
        for name in sorted(read.keys() | self._tensors.keys()):
            ours, theirs = _form(self._tensors.get(name)), _form(read.get(name))
            if ours != theirs:
                raise UsageError(
                    f"the weights of {model_dir} differ from the loaded model's: {name} is {theirs}, and {ours} in the "
                    "loaded one; give a checkpoint of the same shapes and format"
                )
        return read

    def _write(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self._tensors[name].copy_(value)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _HostCopy:
    """A copy of regions' contents in host memory, pinned if the regions lie on a GPU. The kernel frees it when the
    process ends.
    """

    def __init__(self, contents: list[Tensor]) -> None:
        sizes = [_aligned(one.numel()) for one in contents]
        self._map = mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        begins = [0, *accumulate(sizes)]
        self._parts = [whole[begin : begin + one.numel()] for begin, one in zip(begins, contents, strict=False)]
        self.is_current = False
        self._pinned_at = whole.data_ptr() if contents[0].is_cuda else None
        if self._pinned_at is not None:
            # torch.empty(pin_memory=True) would round up to a power of two.
            code = torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
                self._pinned_at, whole.numel(), 0
            )
            if int(code) != 0:
                raise UsageError(
                    f"{whole.numel() >> 20} MiB of host memory can't be pinned for the weights (CUDA error "
                    f"{int(code)}); set sleep_config.restore_modes.model_weights to NONE, or raise the memory limit of "
                    "the container"
                )

    def close(self) -> None:
        """Unpins the memory: CUDA would refuse to pin another mapping at this address."""
        if self._pinned_at is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned_at)  # type: ignore[no-untyped-call]

    def save(self, contents: list[Tensor]) -> None:
        if not self.is_current:
            self._move(contents, self._parts)
            self.is_current = True

    def load(self, contents: list[Tensor]) -> None:
        self._move(self._parts, contents)

    def view(self, region: int, tensor: Tensor) -> Tensor:
        """The copy of ``tensor``, which lies in this region."""
        part = self._parts[region]
        offset = part.storage_offset() // tensor.element_size() + tensor.storage_offset()
        copied = torch.empty(0, dtype=tensor.dtype)
        return copied.set_(part.untyped_storage(), offset, tensor.shape, tensor.stride())

    @staticmethod
    def _move(sources: list[Tensor], targets: list[Tensor]) -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        if sources[0].is_cuda or targets[0].is_cuda:
            torch.cuda.synchronize()


class SleepingRunner(Protocol):
    """A runner whose memory is released with that of another one."""

    def release(self, tags: Collection[MemoryTag]) -> None: ...

    def restore(self, tags: Collection[MemoryTag]) -> None: ...

    def close(self) -> None: ...


class RunnerMemory:
    """Releases, restores and updates a runner's memory between two steps."""

    def __init__(self, weights: WeightMemory, pool: Region | None) -> None:
        """``pool``: the KV pool's region; None if no memory of this runner can be released."""
        self._weights = weights
        self._pool = pool
        self._others: list[SleepingRunner] = []
        self._device = weights.weights.embedding.device

    def add(self, runner: SleepingRunner) -> None:
        """Also releases and restores the memory of a draft model's ``runner``. Its weights are not updated."""
        self._others.append(runner)

    def release(self, tags: Collection[MemoryTag]) -> None:
        """See :meth:`trtx.torch_engine.step.ModelRunner.release`."""
        self._release(tags)
        for other in self._others:
            other.release(tags)

    @torch.inference_mode()
    def _release(self, tags: Collection[MemoryTag]) -> None:
        assert self._pool is not None
        if "model_weights" in tags:
            self._weights.release()
        if "kv_cache" in tags:
            self._pool.release()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def restore(self, tags: Collection[MemoryTag]) -> None:
        """See :meth:`trtx.torch_engine.step.ModelRunner.restore`."""
        self._restore(tags)
        try:
            for other in self._others:
                other.restore(tags)
        except UsageError:
            self._release(tags)
            raise

    @torch.inference_mode()
    def _restore(self, tags: Collection[MemoryTag]) -> None:
        assert self._pool is not None
        try:
            if "model_weights" in tags:
                self._weights.restore()
            if "kv_cache" in tags:
                self._pool.restore()
        except OutOfDeviceMemory as error:
            if "model_weights" in tags and not self._weights.is_released:
                self._weights.release()
            raise UsageError(
                f"the GPU has too little free memory to wake the engine: {error}; end what uses it, and wake again"
            ) from error
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @torch.inference_mode()
    def read_weights(self, model_dir: Path) -> NewWeights:
        """See :meth:`WeightMemory.read`."""
        return self._weights.read(model_dir)

    @torch.inference_mode()
    def replace_weights(self, new: NewWeights) -> None:
        self._weights.replace(new)

    def serve_weights(self) -> None:
        """As :meth:`WeightMemory.serve`."""
        self._weights.serve()

    @property
    def shared_weights(self) -> SharedWeights | None:
        return self._weights.shared

    def close(self) -> None:
        """Frees all regions; the runner's tensors must not be used afterwards."""
        for other in self._others:
            other.close()
        self._weights.close()
        if self._pool is not None:
            self._pool.close()

    @property
    def kv_scales(self) -> Tensor | None:
        """Scales of a float8 KV pool, ``[num_layers, 2]``; None while the weights are released."""
        return None if self._weights.is_released else self._weights.weights.kv_scales


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.element_size() == 1:  # float8 has no infinity in the format that weights use, and no minimum in torch
        return not bool(tensor.isnan().any())
    return all(bool(end.isfinite()) for end in tensor.aminmax())  # a hundred times as fast as isfinite of each value


def _form(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
