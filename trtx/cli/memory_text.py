"""Formats memory plans in 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trtx.cli.sentences import fill
from trtx.memory import MemoryPlan, size_text

_WIDTH = 80


def describe_memory(plans: Sequence[MemoryPlan]) -> Iterator[str]:
    """Yields a table for each role: the memory of one GPU or rank, the room for KV, and notes."""
    for plan in plans:
        yield f"Memory of {plan.role}, {_place(plan)}:"
        for label, size, remark in _rows(plan):
            yield f"  {label:<16}{size:>12}  {remark}".rstrip()
        for note in plan.notes:
            yield from fill(f"  - {note}", _WIDTH)


def _place(plan: MemoryPlan) -> str:
    if not plan.is_gpu:
        part = f"each of a worker's {plan.gpus} ranks" if plan.gpus > 1 else "a worker"
        return f"host memory, {size_text(plan.total_bytes)} for {part}"
    each = f"each of {plan.gpus} GPUs" if plan.gpus > 1 else "one GPU"
    return f"{each}, {plan.device}, {size_text(plan.total_bytes)}"


def _rows(plan: MemoryPlan) -> Iterator[tuple[str, str, str]]:
    yield "weights", size_text(plan.weight_bytes), plan.weight_source
    if plan.engines > 1:
        yield "workers", f"{plan.engines}", "share the weights and divide the rest; of each:"
    yield "activations", size_text(plan.activation_bytes), ""
    if plan.graph_bytes:
        yield "CUDA graphs", size_text(plan.graph_bytes), "and workspaces"
    if plan.context_bytes:
        yield "CUDA context", size_text(plan.context_bytes), "and NCCL" if plan.gpus > 1 else ""
    if plan.transfer_bytes:
        yield "KV transfer", size_text(plan.transfer_bytes), "buffers to send and to receive"
    if plan.encoder_bytes:
        yield "encoder", size_text(plan.encoder_bytes), "a process; its weights are among the above"
    if plan.shared_bytes:
        yield "encode workers", size_text(plan.shared_bytes), "that share the GPU, their largest batches too"
    if plan.others_bytes:
        yield "other processes", size_text(plan.others_bytes), "now"
    share = f"free_gpu_memory_fraction {plan.fraction:g} of what is left" if plan.is_gpu else ""
    bound = share if plan.max_tokens is None else f"max_tokens {plan.max_tokens:,}"
    yield "KV pool", size_text(plan.pool_bytes), bound
    yield "a token", f"{plan.kv_bytes_per_token:,.0f} B", plan.kv_formula
    blocks = f"tokens, {plan.capacity_blocks:,} blocks of {plan.tokens_per_block}"
    yield "holds", f"{plan.capacity_tokens:,}", blocks
    fewer = "" if plan.covers_batch else f"; max_batch_size is {plan.max_batch_size:,}"
    yield "sequences", f"{plan.sequences:,}", f"of {plan.max_seq_len:,} tokens{fewer}"
    if plan.beside_bytes:
        yield "images", size_text(plan.beside_bytes), "at most, beside the pool"
    if plan.uncertainty_bytes:
        yield "may be off by", size_text(plan.uncertainty_bytes), "either way: reserves are estimated"
