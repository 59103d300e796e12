"""The CPU's kernels in which a row's bits depend on its own sequence alone. Products: :mod:`invariant_multiplier`.

Two things make torch's operations depend on what else is in a call: a matrix product's kernel is chosen by shape, and
the elements that fill no whole vector, at the end of a thread's part, go through another exponential than the rest.
So products here have one shape each, which is tried when the kernels are made, and exponentials run over parts that are
whole vectors and too small for a second thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from trtx.checkpoint.model_config import ModelConfig
from trtx.torch_engine.runner.fp8 import FP8, to_fp8
from trtx.torch_engine.runner.kernels import Attention, KvCache, PassInputs
from trtx.torch_engine.runner.torch_kernels import TorchKernels

_VECTOR = 64  # elements of the longest step of a vector loop: two registers of 512 bits of bfloat16
_ONE_THREAD = 32768  # elements: torch gives no thread fewer
_CHUNK = 128  # KV tokens that a sum over them is cut into, from position 0 on
_SMALL_TILE, _LARGE_TILE = 4, 64  # query rows of one sequence that are computed together
_ROWS_AT_ONCE = 256


class InvariantTorchKernels(TorchKernels):
    """See :class:`trtx.torch_engine.runner.kernels.Kernels`.

    A query row's attention is summed over chunks of KV at fixed positions, folded in their order; a chunk that lies
    behind the row adds nothing, to the bit. So it is the same as a decode or in a prompt chunk, wherever that is cut.
    Where the library's products of these shapes round by how many there are in a call, attention is
    :mod:`fixed_attention`'s, without any product and much slower. Norms need no help: each sums over its own row.
    """

    def __init__(self, config: ModelConfig, cache: KvCache, rotary: Tensor) -> None:
        super().__init__(config, cache, rotary, Attention.FIXED)
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

    def attend(self, q: Tensor, layer: int, inputs: PassInputs, scale: Tensor | None = None) -> Tensor:
        if _SMALL_TILE not in self._tile_sizes:
            return super().attend(q, layer, inputs, scale)
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
                sums = self._attend_tiles(queries * dim**-0.5, positions[part], slots[part], layer)
                sums = sums.view(-1, heads, size, group, dim).transpose(1, 2)
                real = rows[part] >= 0
                out[rows[part][real]] = sums[real].reshape(-1, heads * group, dim).to(q.dtype)
        attended = out.flatten(1)
        return attended if scale is None else to_fp8(attended, scale)

    def _attend_tiles(self, queries: Tensor, positions: Tensor, slots: Tensor, layer: int) -> Tensor:
        """``[tiles, kv heads, rows, dim]`` float32; ``positions`` [tiles, size] of the queries, ``slots`` [tiles]."""
        last = positions.amax(dim=1)
        # [tiles, 1, rows]: the rows of a tile are its queries, each with the heads of a group
        seen_to = positions.repeat_interleave(self._group, dim=1).unsqueeze(1)
        best = torch.full(queries.shape[:3], -torch.inf)
        weight, sums = torch.zeros(queries.shape[:3]), torch.zeros_like(queries)
        for start in range(0, int(last.amax()) + 1, _CHUNK):
            active = (last >= start).nonzero().squeeze(1)
            tokens = torch.arange(start, start + _CHUNK)
            keys, values = self._chunk(layer, slots[active], tokens)
            # What lies behind a sequence's end is another's, and a mask makes of its NaN 0 * NaN.
            values = values.masked_fill((tokens > last[active, None])[:, None, :, None], 0.0)
            scores = _batched(queries[active], keys.transpose(-1, -2))
            scores = scores.masked_fill(tokens > seen_to[active].unsqueeze(-1), -torch.inf)
            before = best[active]
            top = torch.maximum(before, scores.amax(dim=-1))
            shares = _by_vectors(torch.exp, scores - top.unsqueeze(-1))
            shrink = torch.where(before == top, 1.0, _by_vectors(torch.exp, before - top))
            weight[active] = weight[active] * shrink + shares.sum(dim=-1)
            sums[active] = sums[active] * shrink.unsqueeze(-1) + _batched(shares, values)
            best[active] = top
        return sums / weight.unsqueeze(-1)

    def _tiles(self, inputs: PassInputs) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each size of tile: (rows of the pass [tiles, size], -1 where there is none; each tile's slot [tiles])"""
        if inputs.spans is None:
            rows = torch.full((inputs.slots.shape[0], _SMALL_TILE), -1)
            rows[:, 0] = torch.arange(inputs.slots.shape[0])
            yield rows, inputs.slots.long()
            return
        starts = inputs.spans.starts.tolist()
        left = list(zip(inputs.spans.slots.tolist(), starts[:-1], starts[1:], strict=True))
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
        """K and V of ``tokens`` of each of ``slots``, float32 ``[slots, kv heads, tokens, dim]``."""
        cache = self._cache
        places = (tokens // cache.tokens_per_block).clamp_max(cache.block_table.shape[1] - 1)
        blocks = cache.block_table[slots].long()[:, places]
        offsets = tokens % cache.tokens_per_block
        kept = cache.pool if cache.scales is None else cache.pool.view(torch.uint8)
        both = []
        for kind in range(2):
            stored = kept[blocks, layer, kind, offsets]  # [slots, tokens, kv heads, dim]
            if cache.scales is None:
                values = stored.float()
            else:
                values = stored.view(FP8).float() * cache.scales[layer, kind]
            both.append(values.transpose(1, 2))
        return both[0], both[1]


def _batched(left: Tensor, right: Tensor) -> Tensor:
    """``[a, b, n, k] @ [a, b, k, m]``, each a product of its own."""
    product = torch.bmm(left.flatten(0, 1), right.flatten(0, 1))
    return product.view(*left.shape[:2], *product.shape[1:])


def _by_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function`` of each element, through the same code whatever x's shape and wherever in x it is."""
    flat = x.reshape(-1)
    flat = F.pad(flat, (0, -flat.numel() % _VECTOR))
    done = torch.cat([function(part) for part in torch.split(flat, _ONE_THREAD)])
    return done[: x.numel()].view(x.shape)


def _is_free(rows: int, part: int, inner: int, columns: int) -> bool:
    """Whether a row of a product of ``rows`` has its bits wherever it stands, among however many products, and those of
    a product of ``part`` of the rows."""
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(_ROWS_AT_ONCE // _SMALL_TILE, 1, rows, inner, generator=generator)
    right = torch.randn(left.shape[0], 1, columns, inner, generator=generator).transpose(-1, -2)
    whole = _batched(left, right)
    is_free = torch.equal(_batched(left.roll(1, 2), right), whole.roll(1, 2))
    is_free &= torch.equal(_batched(left[:, :, :part].clone(), right), whole[:, :, :part])
    for count in (1, 2, 7, 32):
        is_free &= torch.equal(_batched(left[:count].clone(), right[:count].clone()), whole[:count])
    return is_free
