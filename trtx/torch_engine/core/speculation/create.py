"""Creates speculation from its configuration."""

from __future__ import annotations

from trtx.torch_engine.core.speculation.drafters import Drafter, NGramDrafter
from trtx.torch_engine.core.speculation.lengths import DraftLengths
from trtx.torch_engine.core.speculation.speculation import Speculation
from trtx.torch_engine.core.speculation.suffixes import SuffixDrafter
from trtx.torch_engine.llm_args import SpeculativeConfig

_NGRAM_SIZE, _SUFFIX_SIZE = 2, -1  # TensorRT-LLM's defaults of max_matching_ngram_size


def create_speculation(config: SpeculativeConfig, *, is_asynchronous: bool) -> Speculation:
    """``is_asynchronous``: see :class:`Speculation`."""
    lengths = DraftLengths(
        config.max_draft_len, max_concurrency=config.max_concurrency, schedule=config.draft_len_schedule
    )
    return Speculation(_drafter(config), lengths, is_asynchronous=is_asynchronous)


def _drafter(config: SpeculativeConfig) -> Drafter:
    size = config.max_matching_ngram_size
    if config.decoding_type == "SA":
        return SuffixDrafter(max_matching_ngram_size=_SUFFIX_SIZE if size is None else size)
    assert config.decoding_type == "NGram", config.decoding_type  # config/torch_fields.py refuses the others
    return NGramDrafter(
        max_matching_ngram_size=_NGRAM_SIZE if size is None else size,
        is_keep_all=config.is_keep_all,
        is_use_oldest=config.is_use_oldest,
        is_public_pool=config.is_public_pool,
    )
