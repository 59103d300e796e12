"""Batches waiting items, encodes them, and determines each item's outcome."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtx.ipc.encoder_messages import Encode, Encoded, EncoderArgs, EncoderStats
from trtx.ipc.shared_tensor import SharedTensorError, open_shared, share
from trtx.torch_engine.device import device_memory_bytes
from trtx.torch_engine.embeddings.device import DeviceArena
from trtx.torch_engine.vision.towers import Pixels, Tower, UnsuitableImage

log = logging.getLogger(__name__)

FULL_PATCHES = 4096
"""Patches of a full batch, to which no item is added. It keeps a GPU busy, and a CPU too.

On an H100, an image of 5,184 patches took 22.2 ms alone, and as long for each image in a batch of four, which only made
the first image wait for the last.
"""


@dataclass(frozen=True, slots=True)
class _Waiting:
    item_id: int
    pixels: Pixels
    on_device: bool


@dataclass(frozen=True, slots=True)
class _Problem:
    text: str
    is_failure: bool


class Encoder:
    """Encodes items first come, first served, in batches.

    A batch has at most ``max_batch_size`` items, ``max_num_tokens`` rows and :data:`FULL_PATCHES` patches, unless a
    single item has more patches. ``arena``: for rows that stay on the tower's device; None: all rows go through files.
    """

    def __init__(self, tower: Tower, args: EncoderArgs, arena: DeviceArena | None = None) -> None:
        self._tower = tower
        self._args = args
        self._arena = arena
        self._waiting: deque[_Waiting] = deque()
        self._batches = self._items = self._rows = 0
        self._seconds = 0.0

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    def submit(self, message: Encode) -> Encoded | None:
        """Queues an item. Returns its answer if it is invalid, else None."""
        try:
            pixels = self._check(message)
        except (UnsuitableImage, SharedTensorError) as error:
            return Encoded(message.item_id, error=str(error), is_failure=isinstance(error, SharedTensorError))
        self._waiting.append(_Waiting(message.item_id, pixels, message.on_device and self._arena is not None))
        return None

    def _check(self, message: Encode) -> Pixels:
        if message.pixels.dtype != "float32":
            raise UnsuitableImage(
                f"pixels are {message.pixels.dtype}; expected float32, as an image processor gives them"
            )
        pixels = self._tower.check(open_shared(message.pixels), message.grid)
        # Minimum and maximum are NaN if any value is. isfinite() would allocate four arrays of the image's size on a
        # CPU: for 24 MB it takes 20 to 65 ms instead of 2 ms, more than the tower.
        if not torch.stack(torch.aminmax(pixels.values)).isfinite().all():
            raise UnsuitableImage("pixels hold values that are NaN or infinite")
        if pixels.rows > self._args.max_num_tokens:
            raise UnsuitableImage(
                f"the image makes {pixels.rows} tokens; expected at most {self._args.max_num_tokens}, this encoder's "
                "max_num_tokens: send a smaller one"
            )
        return pixels

    def cancel(self, item_ids: Iterable[int]) -> list[Encoded]:
        """Drops waiting items and returns their answers; items that have begun are unaffected."""
        given_up = set(item_ids)
        dropped = [one for one in self._waiting if one.item_id in given_up]
        self._waiting = deque(one for one in self._waiting if one.item_id not in given_up)
        return [Encoded(one.item_id, error="cancelled") for one in dropped]

    @torch.inference_mode()
    def step(self) -> list[Encoded]:
        """Encodes one batch and returns its answers. At least one item must be waiting."""
        began = time.perf_counter()
        batch = self._next_batch()
        results = self._encode(batch)
        answers = [self._answer(one, found) for one, found in zip(batch, results, strict=True)]
        self._batches += 1
        self._items += len(batch)
        self._rows += sum(one.pixels.rows for one in batch)
        self._seconds += time.perf_counter() - began
        return answers

    def stats(self) -> EncoderStats:
        memory = device_memory_bytes(self._tower.device)
        return EncoderStats(self._batches, self._items, self._rows, self._seconds, memory)

    def _next_batch(self) -> list[_Waiting]:
        batch = [self._waiting.popleft()]
        rows, patches = batch[0].pixels.rows, batch[0].pixels.patches
        while self._waiting and len(batch) < self._args.max_batch_size:
            rows += self._waiting[0].pixels.rows
            patches += self._waiting[0].pixels.patches
            if rows > self._args.max_num_tokens or patches > FULL_PATCHES:
                break
            batch.append(self._waiting.popleft())
        return batch

    def _encode(self, batch: Sequence[_Waiting]) -> list[Tensor | _Problem]:
        """Encodes a batch. If anything fails, each item is encoded alone, so that only the offending item fails."""
        try:
            made = self._tower.encode([one.pixels for one in batch])
            found = [rows if one.on_device else rows.cpu() for one, rows in zip(batch, made, strict=True)]
            for one, rows in zip(batch, found, strict=True):
                expected = (one.pixels.rows, self._tower.width)
                assert rows.shape == expected, f"{list(rows.shape)}, expected {list(expected)}"
        except torch.AcceleratorError:
            raise  # the device and everything on it are in an unknown state
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
            if len(batch) > 1:
                log.warning("a batch of %d images failed (%s); each is encoded alone", len(batch), error)
                return [self._encode([one])[0] for one in batch]
            log.exception("an image can't be encoded")
            return [_Problem(f"the encoder failed on this image: {type(error).__name__}: {str(error)[:300]}", True)]
        if all(rows.isfinite().all() for rows in found):
            return list(found)
        if len(batch) > 1:
            return [self._encode([one])[0] for one in batch]
        return [_Problem("the encoder computed values that are NaN or infinite for this image", True)]

    def _answer(self, one: _Waiting, found: Tensor | _Problem) -> Encoded:
        if isinstance(found, _Problem):
            return Encoded(one.item_id, error=found.text, is_failure=found.is_failure)
        try:
            kept = self._arena.keep(found) if one.on_device and self._arena is not None else None
            rows = share(found) if kept is None else kept
        except SharedTensorError as error:
            return Encoded(one.item_id, error=str(error), is_failure=True)
        return Encoded(one.item_id, rows, self._tower.merged(one.pixels.grid))
