"""The arguments and the memory of a draft model, derived from those of its target model."""

from __future__ import annotations

from dataclasses import replace

from trtx.checkpoint.drafts import check_draft, find_draft
from trtx.checkpoint.model_config import ModelConfig
from trtx.memory.draft_models import DraftMemory, draft_memory
from trtx.torch_engine.runner.args import DraftArgs, RunnerArgs


def draft_memory_of(args: RunnerArgs, config: ModelConfig, dtype: str) -> DraftMemory:
    """Returns what the draft model of ``args`` needs. Raises UsageError if it does not fit the target model.

    ``config``, ``dtype``: the target model's.
    """
    draft = args.draft
    assert draft is not None
    directory = find_draft(draft.model, draft.kind)
    check_draft(args.model_dir, directory, draft.kind, layers=draft.layers)
    return draft_memory(
        directory, draft.kind, config, layers=draft.layers, dtype=dtype, max_num_tokens=args.max_num_tokens,
        max_batch_size=args.max_batch_size,
    )  # fmt: skip


def draft_runner_args(args: RunnerArgs, draft: DraftArgs, num_blocks: int) -> RunnerArgs:
    """Returns the arguments of a small model's runner, whose pool has the target model's block ids."""
    return replace(
        args, model_dir=find_draft(draft.model, draft.kind), draft=None, num_blocks=num_blocks, max_tokens=None,
        kv_dtype="auto", guided=False, deterministic=False, merges_passes=True, pass_sizes=None, cpu_threads=None,
        moe_expert_parallel_size=1, weight_group=None,
    )  # fmt: skip
