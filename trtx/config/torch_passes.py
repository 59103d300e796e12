"""Constants, chosen by measurement, of how the torch engine batches its forwards on a GPU.

``python benchmarks/closed_loop.py`` compares the alternatives; docs/performance-notes.md has the results. A
deterministic engine neither runs mixed batches nor pads its forwards.
"""

from __future__ import annotations

LARGE_PARAMETERS = 2_000_000_000
"""The threshold, in parameters of all layers' matmuls, from which a step runs its decodes and its prompt chunks as one
mixed batch and limits prompts to the pace of decodes. Measured on an H100 with 64 clients: 14 % more tokens/s at 6.9e9
parameters (the shape of Qwen3-8B), 12 % fewer at 0.44e9 (Qwen3-0.6B), where reading the weights takes too little time
to hide other work behind it. Sizes in between were not measured."""

WIDEST = 2048
PASS_SIZES = (64, *range(128, WIDEST + 1, 128))
"""CUDA graph buckets in tokens. A forward with prompt chunks is padded to one of these sizes and replayed as a CUDA
graph, for models of any size. A wider forward keeps the GPU busy for longer than its launches take and needs no graph.
The step is 128 because matmul kernels compute in tiles of 128."""

DRAFT_PASS_SIZES = (8, 16, 32)
"""Further buckets of an engine that speculates: the step of a few sequences with drafts has few tokens."""
MOST_SAMPLED_AFTER_DRAFTS = 64
"""Drafted tokens of a step, or max_batch_size if that is more. It bounds the logits of a step."""


def most_drafted(max_batch_size: int, max_draft_len: int) -> int:
    """Returns the largest number of drafted tokens that a step verifies."""
    return min(max(max_batch_size, MOST_SAMPLED_AFTER_DRAFTS), max_batch_size * max_draft_len)


PACED_STEPS = 32
"""A step computes at least one part in this many of all waiting prompt tokens: see
:class:`trtx.torch_engine.core.prefill_budget.PromptPace`."""


def padded_tokens(max_num_tokens: int) -> int:
    """Returns the tokens of the widest padded forward.

    Memory is reserved for it in addition to that of a forward of ``max_num_tokens``.
    """
    return min(WIDEST, max_num_tokens)
