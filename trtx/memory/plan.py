"""Plans the memory of a worker's tightest GPU, or refuses the config with the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtx.memory.budget import Budget, Model, fits, tightest
from trtx.memory.encoder import MediaMemory, encoder_share
from trtx.memory.gpus import MemoryDevice
from trtx.memory.limits import Limits, limits_of
from trtx.memory.models import read_model
from trtx.memory.rank_shares import RankShare, layer_kv_elements
from trtx.memory.refusal import refuse
from trtx.memory.reserves import UNCERTAINTY
from trtx.memory.shapes import ModelShape
from trtx.memory.units import size_text
from trtx.memory.weights import draft_weights

ENCODER_TOKENS = 16384
"""Rows of an encoder's largest batch; equals the torch engine's ``DEFAULT_MAX_NUM_TOKENS``, which this room may not
import."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one role's worker, on its GPU with room for the fewest tokens. All bytes are for that GPU.

    ``pool_bytes`` = ``free_gpu_memory_fraction`` x (total - others - encoder - shared - context - weights - activations
    - graphs - transfers), or the size that ``max_tokens`` requests if that is less. ``capacity_tokens``: if layers have
    windows, the tokens in sequences of ``max_seq_len``. ``uncertainty_bytes``: the possible error of the reserves, in
    either direction. ``encoder_bytes``: the worker's own encoder process including its embedding arena, without the
    tower's weights. ``beside_bytes``: the maximum of the encoder's batch and of the embeddings that the worker holds;
    no pool includes it. ``shared_bytes``: the maximum of all encode workers on the same GPU. ``engines``: the number of
    workers that divide the GPU; with several, total, others and weights are of all of them, and the rest is of one.
    """

    role: str
    device: str
    is_gpu: bool
    gpus: int
    total_bytes: int
    others_bytes: int
    encoder_bytes: int
    beside_bytes: int
    context_bytes: int
    weight_bytes: int
    weight_source: str
    activation_bytes: int
    graph_bytes: int
    transfer_bytes: int
    kv_bytes_per_token: float
    kv_formula: str
    fraction: float
    max_tokens: int | None
    pool_bytes: int
    tokens_per_block: int
    capacity_blocks: int
    capacity_tokens: int
    max_seq_len: int
    sequence_bytes: int
    max_batch_size: int
    uncertainty_bytes: int
    notes: tuple[str, ...]
    shared_bytes: int = 0  # the default is for stored plans from before such workers existed
    engines: int = 1  # likewise

    @property
    def sequences(self) -> int:
        """The number of sequences of ``max_seq_len`` that fit in the pool at once."""
        return self.pool_bytes // self.sequence_bytes

    @property
    def covers_batch(self) -> bool:
        """Whether ``max_batch_size`` sequences of ``max_seq_len`` fit at once; if not, some wait or are preempted."""
        return self.sequences >= self.max_batch_size


def plan_memory(
    checkpoint: Path,
    role: str,
    values: Mapping[str, Any],
    *,
    engine: str,
    device: MemoryDevice,
    media: MediaMemory | None = None,
    engines: int = 1,
) -> MemoryPlan:
    """Plans a worker's memory from ``config.json`` and the headers of the weight files, without touching a device.

    ``values``: the resolved engine config of ``role``. ``media``: for a worker that takes images.
    ``engines``: the number of workers that share the device and its copy of the weights. Raises UsageError if
    the config doesn't fit, with the numbers and the largest values that would fit, and UnknownShapeError for a model
    that this arithmetic does not cover.
    """
    limits = limits_of(values, engine=engine)
    model = replace(read_model(checkpoint, limits, device, media), engines=engines)
    if not fits(model, limits, device):
        raise refuse(role, model, limits, device)
    beside = 0
    if media is not None:
        beside = media.embedding_bytes
        if media.has_encoder:
            beside += encoder_share(checkpoint, values, device, max_num_tokens=ENCODER_TOKENS).batch_bytes
    return _plan(role, model, limits, device, tightest(model, limits, device), beside)


def _plan(role: str, model: Model, limits: Limits, device: MemoryDevice, budget: Budget, beside: int) -> MemoryPlan:
    share, pool = budget.share, budget.pool
    if limits.max_tokens is not None:
        # TensorRT-LLM rounds max_tokens up to whole blocks; the torch engine rounds down.
        blocks = limits.max_tokens // limits.tokens_per_block
        if limits.engine != "torch":
            blocks = -(-limits.max_tokens // limits.tokens_per_block)
        pool = min(pool, blocks * share.sequence_bytes(limits.tokens_per_block)) if not share.has_windows else pool
    context = model.shape.context_length
    longest = min(limits.max_seq_len or context, context)
    sequence = share.sequence_bytes(longest)
    blocks = pool // share.sequence_bytes(limits.tokens_per_block)
    tokens = int(pool / sequence * longest) if share.has_windows else blocks * limits.tokens_per_block
    reserved = budget.context + (budget.activations + budget.graphs if limits.engine != "torch" else 0)
    return MemoryPlan(
        role=role,
        device=device.name,
        is_gpu=device.is_gpu,
        gpus=limits.world,
        total_bytes=device.total_bytes,
        others_bytes=budget.others,
        encoder_bytes=model.encoder_bytes,
        beside_bytes=beside,
        context_bytes=budget.context,
        weight_bytes=share.weight_bytes,
        weight_source=model.weights.source,
        activation_bytes=budget.activations,
        graph_bytes=budget.graphs,
        transfer_bytes=budget.transfers,
        kv_bytes_per_token=share.kv_bytes_per_token,
        kv_formula=_formula(model, limits, budget),
        fraction=limits.fraction,
        max_tokens=limits.max_tokens,
        pool_bytes=pool,
        tokens_per_block=limits.tokens_per_block,
        capacity_blocks=blocks,
        capacity_tokens=tokens,
        max_seq_len=longest,
        sequence_bytes=sequence,
        max_batch_size=limits.max_batch_size,
        uncertainty_bytes=int(reserved * UNCERTAINTY) if device.is_gpu else 0,
        notes=(
            *_notes(model.shape, limits, share, tokens, longest),
            *(_beside_note(budget.left - pool, beside) if device.is_gpu and beside else ()),
        ),
        shared_bytes=model.shared_bytes,
        engines=model.engines,
    )


def _beside_note(room: int, beside: int) -> Iterator[str]:
    """Yields a note if images may need more memory than ``room``, which remains besides pool and reserves."""
    if room < beside:
        yield (
            f"images may take {size_text(beside)} beside the pool, which leaves {size_text(max(0, room))}: lower "
            "kv_cache_config.free_gpu_memory_fraction, or encode on other GPUs (--encode)"
        )


def _formula(model: Model, limits: Limits, budget: Budget) -> str:
    """Formats the KV bytes per token: layers on the GPU times elements per layer (heads or latent) times bytes."""
    shape, layers = model.shape, f"{len(budget.share.kv) - model.kv_padding}"
    if model.kv_padding:
        layers = f"({layers} + {model.kv_padding} of padding)"
    elements = layer_kv_elements(shape, limits)
    per_layer = f"{elements}" if shape.latent else f"2 x {elements // 2 // shape.head_dim} KV heads x {shape.head_dim}"
    spread = f" / {limits.cp}" if limits.cp > 1 else ""
    return f"{layers} layers x {per_layer} x {model.kv_width:g} B{spread}"


def _notes(shape: ModelShape, limits: Limits, share: RankShare, tokens: int, longest: int) -> list[str]:
    notes = []
    if limits.max_seq_len is not None and limits.max_seq_len > shape.context_length:
        notes.append(f"max_seq_len {limits.max_seq_len} is lowered to the model's {shape.context_length} positions")
    if tokens < longest:
        notes.append(
            f"the pool bounds a sequence to {tokens} tokens, below the model's {longest}: the engine lowers max_seq_len"
        )
    if limits.windows:
        held = sum(layer.window is not None for layer in share.kv)
        notes.append(f"{held} of {len(share.kv)} layers hold at most a window of tokens, as max_attention_window says")
    elif any(shape.windows) and limits.engine != "torch":
        layers = sum(window is not None for window in shape.windows)
        notes.append(
            f"{layers} of {len(shape.windows)} layers attend to a window, but hold all tokens unless "
            "kv_cache_config.max_attention_window lists it"
        )
    if limits.draft_model and limits.engine == "torch":
        notes.append(f"weights and layers include those of the draft model {limits.draft_model}")
    elif limits.draft_model and draft_weights(limits) is None:
        notes.append(f"the draft model {limits.draft_model} is not on this machine, and not in these figures")
    return notes
