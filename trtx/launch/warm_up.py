"""The launcher's own first requests, and whether the torch engine as it is configured can take them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trtx.checkpoint import Checkpoint
from trtx.config import ResolvedEngineConfig, Role
from trtx.config.torch_limits import DEFAULT_TOKENS_PER_BLOCK
from trtx.errors import UsageError
from trtx.text import load_decoder

WARM_UP_TOKENS = 8
"""That each asks for; where the sequence ends before, the engine makes fewer."""
_PROMPT = "Count from one to ten, then say which of the numbers are even. This is warm-up request "


def warm_up_prompt(number: int) -> str:
    """Each another, so that no cache answers for a worker."""
    return f"{_PROMPT}{number}."


def check_warm_up(configs: Mapping[Role, ResolvedEngineConfig], checkpoint: Checkpoint) -> None:
    """Raises UsageError for a config of the torch engine that takes no prompt as long as theirs.

    The topology would start, load, and be given up over the first request. The tokenizer is read only where a bound is
    so low that the prompt's bytes might not fit.
    """
    prompt = warm_up_prompt(0)
    for role, config in configs.items():
        if role == "encode":  # which takes no prompts
            continue
        longest, path = min(_bounds(role, config.values), default=(None, ""))
        if longest is None or longest > len(prompt.encode()) + 2:  # at most a token a byte, with BOS and EOS
            continue
        try:
            needed = len(load_decoder(checkpoint.path).encode(prompt).ids)
        except UsageError:  # no tokenizer that can be read: the worker says so better
            continue
        if longest < needed:
            raise UsageError(
                f"{role}: with its {path} the torch engine takes prompts of at most {longest} tokens, and the "
                f"launcher's own first request has {needed}; raise {path}"
            )


def _bounds(role: Role, values: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """The longest prompt in tokens that each field leaves, and the field: one token of a sequence is the answer's."""
    cache = values.get("kv_cache_config") or {}
    if (longest := values.get("max_seq_len")) is not None:
        yield longest - 1, "max_seq_len"
    if (pool := cache.get("max_tokens")) is not None:
        block = cache.get("tokens_per_block") or DEFAULT_TOKENS_PER_BLOCK
        yield pool // block * block - 1, "kv_cache_config.max_tokens"
    step = values.get("max_num_tokens")
    if step is not None and role != "decode" and not values.get("enable_chunked_prefill"):
        yield step, "max_num_tokens"  # a prompt is one step where nothing is chunked
