"""The launcher's warm-up requests, and whether the configured torch engine can serve them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trtx.checkpoint import Checkpoint
from trtx.config import ResolvedEngineConfig, Role
from trtx.config.torch_limits import DEFAULT_TOKENS_PER_BLOCK
from trtx.errors import UsageError
from trtx.text import load_decoder

WARM_UP_TOKENS = 8
"""Number of tokens per warm-up request; the engine makes fewer if the sequence length is exhausted."""
_PROMPT = "Count from one to ten, then say which of the numbers are even. This is warm-up request "


def warm_up_prompt(number: int) -> str:
    """A different prompt for each number, so that no worker answers from its cache."""
    return f"{_PROMPT}{number}."


def check_warm_up(configs: Mapping[Role, ResolvedEngineConfig], checkpoint: Checkpoint) -> None:
    """Raises UsageError if a config of the torch engine is too small for the warm-up prompts.

    Otherwise the topology would start, load, and give up at the first request. The tokenizer is read only if a limit is
    so low that the prompt's bytes might not fit.
    """
    prompt = warm_up_prompt(0)
    for role, config in configs.items():
        if role == "encode":  # encoders take no prompts
            continue
        longest, path = min(_bounds(role, config.values), default=(None, ""))
        if longest is None or longest > len(prompt.encode()) + 2:  # at most one token per byte, plus BOS and EOS
            continue
        try:
            needed = len(load_decoder(checkpoint.path).encode(prompt).ids)
        except UsageError:  # unreadable tokenizer: the worker's own error is clearer
            continue
        if longest < needed:
            raise UsageError(
                f"{role}: with its {path} the torch engine takes prompts of at most {longest} tokens, and the "
                f"launcher's own first request has {needed}; raise {path}"
            )


def _bounds(role: Role, values: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """The longest prompt that each field allows, in tokens, and the field.

    One token of the sequence is left for the answer.
    """
    cache = values.get("kv_cache_config") or {}
    if (longest := values.get("max_seq_len")) is not None:
        yield longest - 1, "max_seq_len"
    if (pool := cache.get("max_tokens")) is not None:
        block = cache.get("tokens_per_block") or DEFAULT_TOKENS_PER_BLOCK
        yield pool // block * block - 1, "kv_cache_config.max_tokens"
    step = values.get("max_num_tokens")
    if step is not None and role != "decode" and not values.get("enable_chunked_prefill"):
        yield step, "max_num_tokens"  # without chunked prefill, a prompt must fit in one step
