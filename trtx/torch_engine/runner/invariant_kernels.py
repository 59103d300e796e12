"""Batch-invariant CPU kernels: a row's bits depend only on its own sequence. Matmuls: :mod:`invariant_multiplier`.

Two things make the result of a torch operation depend on the rest of a call. First, the shape decides a matmul's
kernel. Second, the last elements of a thread's share that don't fill a whole vector go through a different exponential.
So each matmul here has one fixed shape, which is tested when the kernels are created, and exponentials run over parts
that consist of whole vectors and are too small for a second thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from trtx.checkpoint.model_config import ModelConfig
from trtx.torch_engine.runner.fp8 import FP8, to_fp8
from trtx.torch_engine.runner.kernels import Attention, KvCache, PassInputs
from trtx.torch_engine.runner.torch_kernels import TorchKernels

_VECTOR = 64  # elements in the longest vector loop step: two 512-bit registers of bfloat16
_ONE_THREAD = 32768  # elements: torch gives no thread fewer
_CHUNK = 128  # KV tokens in a chunk, counted from position 0
_SMALL_TILE, _LARGE_TILE = 4, 64  # query rows of one sequence that are computed together
_ROWS_AT_ONCE = 256


class InvariantTorchKernels(TorchKernels):
    """Batch-invariant :class:`trtx.torch_engine.runner.kernels.Kernels`.

    A query row's attention is summed over chunks of KV at fixed positions and folded in their order; a chunk after the
    row's position, or before its window, adds exactly nothing. So a row gets the same bits as a decode and in a prompt
    chunk, however the prompt is split. If the library's matmuls of these shapes round differently with the number of
    matmuls in a call, :mod:`fixed_attention` computes attention without matmuls, and much slower. Norms need no change:
    each sums over its own row.
    """

    def __init__(self, config: ModelConfig, cache: KvCache, rotary: Tensor, local_rotary: Tensor | None = None) -> None:
        super().__init__(config, cache, rotary, Attention.FIXED, local_rotary)
        self._group = group = config.num_heads // config.num_kv_heads
        shapes = ((config.head_dim, _CHUNK), (_CHUNK, config.head_dim))
        self._tile_sizes = [
            size
            for size in (_LARGE_TILE, _SMALL_TILE)
            if all(_is_free(size * group, _SMALL_TILE * group, *shape) for shape in shapes)
        ]

    def silu_and_mul(self, gate_up: Tensor, scale: Tensor | None = None) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        product = _by_vectors(F.silu, gate) * up
        return product if scale is None else to_fp8(product, scale)

    def gelu_and_mul(self, gate_up: Tensor, scale: Tensor | None = None) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        product = _by_vectors(partial(F.gelu, approximate="tanh"), gate) * up
        return product if scale is None else to_fp8(product, scale)

    def sigmoid(self, x: Tensor) -> Tensor:
        return _by_vectors(torch.sigmoid, x)

    def attend(
        self, q: Tensor, layer: int, inputs: PassInputs, scale: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        if _SMALL_TILE not in self._tile_sizes:
            return super().attend(q, layer, inputs, scale, sinks)
        heads, group, dim = self._config.num_kv_heads, self._group, self._config.head_dim
        out = torch.empty_like(q)
        for rows, slots in self._tiles(inputs):
            size = rows.shape[1]
            # Padding repeats a tile's first row: [tiles, size]
            filled = torch.where(rows >= 0, rows, rows[:, :1])
            positions = inputs.positions.long()[filled]
            at_once = _ROWS_AT_ONCE // size
            for begin in range(0, rows.shape[0], at_once):
                part = slice(begin, begin + at_once)
                # [tiles, kv heads, size * group, dim]
                queries = q[filled[part]].float().view(-1, size, heads, group, dim).transpose(1, 2)
                queries = queries.reshape(-1, heads, size * group, dim)
                sums = self._attend_tiles(queries * dim**-0.5, positions[part], slots[part], layer, sinks)
                sums = sums.view(-1, heads, size, group, dim).transpose(1, 2)
                real = rows[part] >= 0
                out[rows[part][real]] = sums[real].reshape(-1, heads * group, dim).to(q.dtype)
        attended = out.flatten(1)
        return attended if scale is None else to_fp8(attended, scale)

    def _attend_tiles(
        self, queries: Tensor, positions: Tensor, slots: Tensor, layer: int, sinks: Tensor | None
    ) -> Tensor:
        """Attention of tiles of query rows.

        ``queries`` [tiles, kv heads, rows, dim] float32; ``positions`` [tiles, size] of the queries; ``slots`` [tiles].
        """
        last, window = positions.amax(dim=1), self._windows[layer]
        lowest = torch.zeros_like(last) if window is None else (positions.amin(dim=1) - window + 1).clamp_min(0)
        # [tiles, 1, rows]: a tile has one row for each query and each head of its KV head's group
        seen_to = positions.repeat_interleave(self._group, dim=1).unsqueeze(1)
        best = torch.full(queries.shape[:3], -torch.inf)
        weight, sums = torch.zeros(queries.shape[:3]), torch.zeros_like(queries)
        if sinks is not None:  # before all tokens, as a token whose value is zero
            by_row = sinks.float().view(-1, 1, self._group).expand(-1, positions.shape[1], -1)
            best = by_row.reshape(1, -1, queries.shape[2]).repeat(queries.shape[0], 1, 1)
            weight.fill_(1.0)
        for start in range(int(lowest.amin()) // _CHUNK * _CHUNK, int(last.amax()) + 1, _CHUNK):
            active = ((last >= start) & (lowest < start + _CHUNK)).nonzero().squeeze(1)
            if not active.numel():
                continue
            tokens = torch.arange(start, start + _CHUNK)
            keys, values = self._chunk(layer, slots[active], tokens)
            # Beyond a sequence's end, and in blocks before its window, are other sequences' values, and a mask turns
            # their NaN into 0 * NaN.
            foreign = (tokens > last[active, None]) | (tokens < lowest[active, None])
            values = values.masked_fill(foreign[:, None, :, None], 0.0)
            scores = _batched(queries[active], keys.transpose(-1, -2))
            unseen = tokens > seen_to[active].unsqueeze(-1)
            if window is not None:
                unseen |= tokens <= seen_to[active].unsqueeze(-1) - window
            scores = scores.masked_fill(unseen, -torch.inf)
            before = best[active]
            top = torch.maximum(before, scores.amax(dim=-1))
            base = top.masked_fill(top == -torch.inf, 0.0)  # a row that has attended to no token yet
            shares = _by_vectors(torch.exp, scores - base.unsqueeze(-1))
            shrink = torch.where(before == top, 1.0, _by_vectors(torch.exp, before - top))
            weight[active] = weight[active] * shrink + shares.sum(dim=-1)
            sums[active] = sums[active] * shrink.unsqueeze(-1) + _batched(shares, values)
            best[active] = top
        return sums / weight.unsqueeze(-1)

    def _tiles(self, inputs: PassInputs) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields for each tile size: (rows of the forward [tiles, size], -1 for padding; each tile's slot [tiles])."""
        if inputs.spans is None:
            rows = torch.full((inputs.slots.shape[0], _SMALL_TILE), -1)
            rows[:, 0] = torch.arange(inputs.slots.shape[0])
            yield rows, inputs.slots.long()
            return
        starts = inputs.spans.starts.tolist()
        left = [(slot, row, row + 1) for row, slot in enumerate(inputs.slots[: inputs.num_decodes].tolist())]
        left += zip(inputs.spans.slots.tolist(), starts[:-1], starts[1:], strict=True)
        for size in self._tile_sizes:
            tiles, owners, rest = [], [], []
            for slot, begin, end in left:
                count = (end - begin) // size if size != _SMALL_TILE else -(-(end - begin) // size)
                rows = torch.arange(begin, begin + count * size).view(count, size)
                tiles.append(rows.masked_fill(rows >= end, -1))
                owners += [slot] * count
                rest.append((slot, begin + count * size, end))
            left = [(slot, begin, end) for slot, begin, end in rest if begin < end]
            if owners:
                yield torch.cat(tiles), torch.tensor(owners)

    def _chunk(self, layer: int, slots: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """K and V at positions ``tokens`` for each of ``slots``: float32 ``[slots, kv heads, tokens, dim]``."""
        cache = self._cache
        table, index = cache.place(layer)
        places = (tokens // cache.tokens_per_block).clamp_max(table.shape[1] - 1)
        blocks = table[slots].long()[:, places]
        offsets = tokens % cache.tokens_per_block
        kept = cache.pool if cache.scales is None else cache.pool.view(torch.uint8)
        both = []
        for kind in range(2):
            stored = kept[blocks, index, kind, offsets]  # [slots, tokens, kv heads, dim]
            if cache.scales is None:
                values = stored.float()
            else:
                values = stored.view(FP8).float() * cache.scales[layer, kind]
            both.append(values.transpose(1, 2))
        return both[0], both[1]


def _batched(left: Tensor, right: Tensor) -> Tensor:
    """``[a, b, n, k] @ [a, b, k, m]``, each [n, k] @ [k, m] a separate matmul."""
    product = torch.bmm(left.flatten(0, 1), right.flatten(0, 1))
    return product.view(*left.shape[:2], *product.shape[1:])


def _by_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies ``function`` element-wise through the same code path for every element and every shape of x."""
    flat = x.reshape(-1)
    flat = F.pad(flat, (0, -flat.numel() % _VECTOR))
    done = torch.cat([function(part) for part in torch.split(flat, _ONE_THREAD)])
    return done[: x.numel()].view(x.shape)


def _is_free(rows: int, part: int, inner: int, columns: int) -> bool:
    """Tests whether a row of a batched matmul has the same bits at any place, in any batch size, and with both row
    counts ``rows`` and ``part``.
    """
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(_ROWS_AT_ONCE // _SMALL_TILE, 1, rows, inner, generator=generator)
    right = torch.randn(left.shape[0], 1, columns, inner, generator=generator).transpose(-1, -2)
    whole = _batched(left, right)
    is_free = torch.equal(_batched(left.roll(1, 2), right), whole.roll(1, 2))
    is_free &= torch.equal(_batched(left[:, :, :part].clone(), right), whole[:, :, :part])
    for count in (1, 2, 7, 32):
        is_free &= torch.equal(_batched(left[:count].clone(), right[:count].clone()), whole[:count])
    return is_free
