"""Creates speculation from its configuration."""

from __future__ import annotations

from trtx.torch_engine.core.speculation.drafters import NGramDrafter
from trtx.torch_engine.core.speculation.lengths import DraftLengths
from trtx.torch_engine.core.speculation.model_drafts import ModelDrafts
from trtx.torch_engine.core.speculation.sources import DraftSource, LookupDrafts
from trtx.torch_engine.core.speculation.speculation import Speculation
from trtx.torch_engine.core.speculation.suffixes import SuffixDrafter
from trtx.torch_engine.llm_args import SpeculativeConfig
from trtx.torch_engine.step import ModelRunner

_NGRAM_SIZE, _SUFFIX_SIZE = 2, -1  # TensorRT-LLM's defaults of max_matching_ngram_size


def create_speculation(config: SpeculativeConfig, runner: ModelRunner, *, max_num_tokens: int) -> Speculation:
    """Creates what ``config`` describes. ``runner``: runs the target model and the draft model, if ``config`` names
    one. ``max_num_tokens``: the largest number of tokens of a step.
    """
    lengths = DraftLengths(
        config.max_draft_len, max_concurrency=config.max_concurrency, schedule=config.draft_len_schedule
    )
    return Speculation(_source(config, runner, max_num_tokens), lengths, is_asynchronous=runner.is_asynchronous)


def _source(config: SpeculativeConfig, runner: ModelRunner, max_num_tokens: int) -> DraftSource:
    if runner.draft_model is not None:
        return ModelDrafts(
            runner.draft_model, tokens_per_block=runner.geometry.tokens_per_block, max_num_tokens=max_num_tokens
        )
    size = config.max_matching_ngram_size
    if config.decoding_type == "SA":
        return LookupDrafts(
            SuffixDrafter(
                max_matching_ngram_size=_SUFFIX_SIZE if size is None else size,
                enable_global_pool=config.enable_global_pool,
                global_pool_size=config.global_pool_size,
            )
        )
    assert config.decoding_type == "NGram", config.decoding_type  # config/torch_limits.py refuses the others
    return LookupDrafts(
        NGramDrafter(
            max_matching_ngram_size=_NGRAM_SIZE if size is None else size,
            is_keep_all=config.is_keep_all,
            is_use_oldest=config.is_use_oldest,
            is_public_pool=config.is_public_pool,
        )
    )
