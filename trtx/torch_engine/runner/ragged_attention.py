"""Launches of :mod:`triton_ragged_attention`: split-KV attention over sequences of different lengths."""

# torch leaves its streams untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
import triton
from torch import Tensor

from trtx.checkpoint.model_config import ModelConfig
from trtx.torch_engine.runner.kernels import FIXED_CHUNK, KvCache, PassInputs, Spans, WorkList
from trtx.torch_engine.runner.triton_ragged_attention import ragged_attention_kernel
from trtx.torch_engine.runner.triton_work_lists import ITEM, plan_kernel

_LEAST_CHUNK, _LONG_CHUNK = 64, 2048
_SHORT = 2048  # tokens of a sequence; the chunks of longer ones use the widest tiles, which read the KV less often
_ANY = 2**31 - 1
_FIXED_PROGRAMS = 4  # for each SM, in a launch whose programs loop over the list
_FIXED_PART_ROWS = 2048  # 32 MiB at 32 heads of 128. A tile without room left is not split
_BLOCK_ITEMS = 64


@dataclass(frozen=True, slots=True)
class _Tile:
    """Sizes of one compiled kernel.

    ``items``: target number of work items for each SM over the whole forward; ``fewer_items``: a smaller target, used
    while it keeps chunks below :data:`_LONG_CHUNK`. ``whole_first``: process the KV that every row attends to without
    masks, in tiles with many steps of it. ``fold_chunks``: number of a token's partial results that are folded at once.
    ``table_ahead``: each step loads the block ids of the next one. It keeps one more step of K and V in flight at the
    same ``stages``, and costs shared memory. ``in_waves``: only one program fits on an SM, so the number of items is
    the best one for whole waves of programs, up to ``items`` waves.
    """

    rows: int
    tokens: int
    warps: int
    stages: int
    items: int
    fewer_items: int
    whole_first: bool = False
    fold_chunks: int = 1
    table_ahead: bool = False
    in_waves: bool = False


_TILES = (
    # Small programs of two warps: many fit on an SM, so that many loads are in flight.
    _Tile(16, 32, 2, 3, 6, 4, fold_chunks=16, table_ahead=True),
    # Two programs fit on an SM, and a short prompt has enough tiles for all SMs.
    _Tile(64, 64, 4, 3, 1, 1, whole_first=True, table_ahead=True),
    # The block table's load precedes those of K and V: with 5 stages, two of these are in flight. 4 waves: what was
    # measured. Each wave costs 8 MiB of partial results at 32 heads of 128.
    _Tile(128, 64, 8, 5, 4, 4, whole_first=True, in_waves=True),
)
_FLOAT8_DECODES = _Tile(16, 64, 2, 3, 6, 4, fold_chunks=16, table_ahead=True)  # tokens take half of the memory
_FIXED_TILE = _Tile(64, 64, 8, 3, 2, 2)  # 8 warps: with 4, two accumulators exceed the registers
# For float32, or heads above 128: limited by shared memory.
_NARROW_TILES = (_Tile(16, 32, 4, 2, 4, 2, fold_chunks=16), _Tile(32, 32, 4, 2, 4, 4, whole_first=True))


class RaggedAttention:
    """Attention of one forward's sequences, with any number of new tokens each, over one KV cache."""

    def __init__(
        self,
        config: ModelConfig,
        cache: KvCache,
        num_processors: int,
        *,
        fixed: bool,
        fixed_part_rows: int = _FIXED_PART_ROWS,
    ) -> None:
        """``fixed``: :attr:`trtx.torch_engine.runner.kernels.Attention.FIXED`.

        ``fixed_part_rows``: rows of its partial results.
        """
        self._config = config
        self._cache = cache
        self._num_processors = num_processors
        self._fixed = fixed
        self._fixed_part_rows = fixed_part_rows
        places = [cache.place(layer) for layer in range(config.num_layers)]
        self._tables = [table for table, _ in places]
        self._layers = [cache.pool[:, index] for _, index in places]
        self._windows = config.windows or (None,) * config.num_layers
        self._kinds = tuple(dict.fromkeys(self._windows))  # one set of work lists for each
        self._kv_scales: list[Tensor | None] = [None] * config.num_layers
        if cache.scales is not None:
            self._kv_scales = list(cache.scales.unbind(0))
        block_stride, _, kv_stride, token_stride, head_stride, _ = cache.pool.stride()
        self._strides = (block_stride, kv_stride, token_stride, head_stride)
        self._scale = config.head_dim**-0.5 * math.log2(math.e)  # the kernels' exponentials are to base 2
        self._block_dim = max(16, triton.next_power_of_2(config.head_dim))
        # Sized for a full batch, so that it compiles once: a forward has at most as many sequences as slots, plus
        # padding.
        self._block_sequences = max(16, triton.next_power_of_2(cache.block_table.shape[0]))
        self._lanes = triton.next_power_of_2(config.num_heads // config.num_kv_heads)
        self._beside: torch.cuda.Stream | None = None  # runs a forward's other lists concurrently with the first

    def planned(self, inputs: PassInputs, dtype: torch.dtype) -> PassInputs:
        """Returns ``inputs`` with their work lists, those of each of the model's windows. ``dtype``: q's.

        Launches, grids and allocations depend only on shapes and host numbers: the numbers of tokens, decodes and
        spans, and ``max_length``. So a CUDA graph of a forward serves every forward of its shape: ``max_length`` may
        exceed the longest span, ``starts`` may end before the last token, and a span may be empty. Tokens outside all
        spans get no output; tokens of the padding slot get zeros.
        """
        work = tuple(chain.from_iterable(self._lists(inputs, dtype, window) for window in self._kinds))
        return replace(inputs, work=work)

    def _lists(self, inputs: PassInputs, dtype: torch.dtype, window: int | None) -> Iterator[WorkList]:
        """Builds the work lists of the layers with ``window``."""
        spans = inputs.spans
        count = inputs.slots.shape[0] if spans is None else inputs.num_decodes
        if count:
            tile = self._tile(dtype, 1)
            yield self._work(tile, window, 1, inputs.slots, None, inputs.positions, count=count, tiles=count)
        if (decodes := inputs.decodes) is not None:
            tile, count = self._tile(dtype, 1), decodes.slots.shape[0]
            yield self._work(
                tile, window, 1, decodes.slots, decodes.starts, decodes.contexts, count=count, tiles=count
            )  # fmt: skip
        if spans is not None:
            count = spans.slots.shape[0]
            for tile, above, up_to in self._tiles_of(spans, dtype, window):
                tiles = inputs.slots.shape[0] // (tile.rows // self._lanes) + count
                yield self._work(
                    tile, window, spans.max_length, spans.slots, spans.starts, spans.contexts, count=count,
                    tiles=tiles, above=above, up_to=up_to,
                )  # fmt: skip

    def _work(
        self,
        tile: _Tile,
        window: int | None,
        longest: int,
        slots: Tensor,
        starts: Tensor | None,
        contexts: Tensor,
        *,
        count: int,
        tiles: int,
        above: int = -1,
        up_to: int = _ANY,
    ) -> WorkList:
        """Builds the work list of the first ``count`` of ``slots``, with at most ``tiles`` tiles, in one launch.

        See :func:`plan_kernel` for the other arguments.
        """
        config, device, tile_rows = self._config, slots.device, tile.rows // self._lanes
        wanted, fewer = (
            max(1, items * self._num_processors // config.num_kv_heads) for items in (tile.items, tile.fewer_items)
        )
        if self._fixed:
            part_rows = self._fixed_part_rows
            most_items = tiles + part_rows
        elif tile.in_waves:
            most_items = tiles + wanted
            part_rows = wanted * min(tile_rows, longest)
        else:
            # All tiles of a sequence have as many chunks as its last tile needs: up to twice the total that they need.
            most_items = tiles + wanted * (1 if starts is None else 2)
            part_rows = 2 * wanted * min(tile_rows, longest)
        work = WorkList(
            num_items=torch.empty(1, dtype=torch.int32, device=device),
            items=torch.empty(most_items, ITEM.value, dtype=torch.int32, device=device),
            arrived=torch.empty(most_items, config.num_kv_heads, dtype=torch.int32, device=device),
            part_sums=torch.empty(part_rows, config.num_heads, config.head_dim, dtype=torch.float32, device=device),
            part_weights=torch.empty(part_rows, config.num_heads, 2, dtype=torch.float32, device=device),
            tile_rows=tile_rows,
            block_rows=tile.rows,
            window=window,
        )
        plan_kernel[(count,)](
            slots, starts, contexts, work.num_items, work.items, work.arrived,
            self._cache.padding_slot, count, self._num_processors, wanted, fewer,
            FIXED_CHUNK if self._fixed else _LEAST_CHUNK, _LONG_CHUNK, part_rows, above, up_to, window,
            TILE_ROWS=tile_rows, BLOCK_TOKENS=tile.tokens, NUM_KV_HEADS=config.num_kv_heads, FIXED=self._fixed,
            MOST_WAVES=tile.items if tile.in_waves else 0, BLOCK_SEQUENCES=self._block_sequences,
            BLOCK_ITEMS=_BLOCK_ITEMS, BLOCK_KV_HEADS=triton.next_power_of_2(config.num_kv_heads), num_warps=1,
        )  # fmt: skip
        return work

    def attend(
        self,
        q: Tensor,
        layer: int,
        work: tuple[WorkList, ...],
        out: Tensor,
        scale: Tensor | None,
        sinks: Tensor | None = None,
        *,
        overlaps: bool,
    ) -> None:
        """Computes ``out`` from ``q``, both [tokens, heads, dim] of the forward that ``work`` belongs to.

        ``scale``: the input scale of the float8 matmul that consumes ``out``. ``sinks`` [heads]: as in
        :meth:`trtx.torch_engine.runner.kernels.Kernels.attend`. ``overlaps``: see :mod:`triton_skinny_gemm`.

        In a CUDA graph, the lists run concurrently: decodes are bound by memory, chunks by arithmetic. Outside a graph
        they run in sequence, because the additional launches would cost the host more time than they save.
        """
        lists = [one for one in work if one.window == self._windows[layer]]
        others = lists[1:]
        if others and q.is_cuda and torch.cuda.is_current_stream_capturing():
            main = torch.cuda.current_stream()
            self._beside = self._beside or torch.cuda.Stream()
            self._beside.wait_stream(main)
            with torch.cuda.stream(self._beside):
                for part in others:
                    self._attend(q, layer, part, out, scale, sinks, overlaps=False)
            self._attend(q, layer, lists[0], out, scale, sinks, overlaps=overlaps)
            main.wait_stream(self._beside)
        else:
            for part in lists:
                self._attend(q, layer, part, out, scale, sinks, overlaps=overlaps)

    def _attend(
        self,
        q: Tensor,
        layer: int,
        work: WorkList,
        out: Tensor,
        scale: Tensor | None,
        sinks: Tensor | None,
        *,
        overlaps: bool,
    ) -> None:
        config = self._config
        tile = next(tile for tile in self._tiles(q.dtype) if tile.rows == work.block_rows)
        programs = work.items.shape[0] * config.num_kv_heads
        if self._fixed:
            programs = min(programs, _FIXED_PROGRAMS * self._num_processors)
        ragged_attention_kernel[(programs,)](
            q, self._layers[layer], self._tables[layer], out, work.num_items, work.items, work.arrived,
            work.part_sums, work.part_weights, sinks, self._kv_scales[layer], scale,
            work.window, self._scale, self._cache.block_table.shape[1], *self._strides,
            NUM_HEADS=config.num_heads, NUM_KV_HEADS=config.num_kv_heads, HEAD_DIM=config.head_dim,
            TOKENS_PER_BLOCK=self._cache.tokens_per_block, TILE_ROWS=work.tile_rows, BLOCK_ROWS=tile.rows,
            BLOCK_TOKENS=tile.tokens, BLOCK_DIM=self._block_dim, FIXED=self._fixed,
            FOLD_CHUNKS=1 if self._fixed else tile.fold_chunks, WHOLE_FIRST=tile.whole_first and not self._fixed,
            TABLE_AHEAD=tile.table_ahead, num_warps=tile.warps, num_stages=tile.stages,
            OVERLAPS=overlaps, launch_pdl=overlaps,
        )  # fmt: skip

    def _tiles(self, dtype: torch.dtype) -> tuple[_Tile, ...]:
        """Tiles in ascending order of rows.

        FIXED has a single one, since matmuls of another shape round differently.
        """
        is_narrow = dtype == torch.float32 or self._block_dim > 128
        tiles: tuple[_Tile, ...] = _NARROW_TILES if is_narrow else _TILES
        if self._cache.scales is not None and not is_narrow:
            tiles = (_FLOAT8_DECODES, *tiles[1:])
        if self._fixed:
            tiles = _NARROW_TILES[-1:] if is_narrow else (_FIXED_TILE,)
        return tuple(replace(tile, rows=max(tile.rows, self._lanes)) for tile in tiles)

    def _tiles_of(self, spans: Spans, dtype: torch.dtype, window: int | None) -> list[tuple[_Tile, int, int]]:
        """Returns (tile, exclusive minimum, inclusive maximum of tokens) for each work list that ``spans`` need.

        No sequence has much KV to read through a short window.
        """
        widest = self._tile(dtype, spans.max_length)
        narrower = [tile for tile in self._tiles(dtype)[1:] if tile.rows < widest.rows]
        if not narrower:
            return [(widest, -1, _ANY)]
        short = (narrower[-1], -1, _SHORT)
        if window is not None and window <= _SHORT:
            return [(narrower[-1], -1, _ANY)]
        if spans.max_context is not None and spans.max_context + spans.max_length <= _SHORT:
            return [short]
        return [short, (widest, _SHORT, _ANY)]

    def _tile(self, dtype: torch.dtype, longest: int) -> _Tile:
        """The smallest tile that holds all new tokens of a sequence, or the largest tile."""
        tiles = self._tiles(dtype)
        return next((tile for tile in tiles if tile.rows >= longest * self._lanes), tiles[-1])
