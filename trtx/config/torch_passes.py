"""How the torch engine's steps are computed on a GPU: what measurements decided, in one place.

``python benchmarks/closed_loop.py`` compares the ways; docs/performance-notes.md has what was found. A deterministic
engine neither merges nor pads passes.
"""

from __future__ import annotations

LARGE_PARAMETERS = 2_000_000_000
"""Of all layers' products. From so many on, a step's decodes and prompt chunks are one pass over the weights, and
prompts keep pace with decodes. Measured on an H100 with 64 clients: 14 % more tokens/s with 6.9e9 (Qwen3-8B's shape),
12 % fewer with 0.44e9 (Qwen3-0.6B's), whose weights are read too soon for much to hide behind it. In between nothing
was measured."""

WIDEST = 2048
PASS_SIZES = (64, *range(128, WIDEST + 1, 128))
"""Tokens. A pass with prompt chunks is padded to one of them and replayed as its CUDA graph, whatever the model's size.
Wider passes keep a GPU busy for longer than it takes to launch them; products are made of tiles of 128."""

PACED_STEPS = 32
"""See :class:`trtx.torch_engine.core.prompt_pace.PromptPace`."""


def padded_tokens(max_num_tokens: int) -> int:
    """Of the widest padded pass, for which memory is kept beside that of a pass of ``max_num_tokens``."""
    return min(WIDEST, max_num_tokens)
