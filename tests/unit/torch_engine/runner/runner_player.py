"""Tiny random checkpoints made by transformers, and a player that steps a runner as a scheduler would."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner
from trtx.torch_engine.step import Batch, ModelRunner, Sampled, ScheduledSequence

VOCAB = 211
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.2,  # wide, so that no top-2 margin is a rounding accident
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
# The first layer is dense; an expert is narrower than the dense MLP.
_EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True,
    "mlp_only_layers": [0],
}  # fmt: skip
# Two layers of three have the window. The limit clamps some of the gates, and the ends of the ramp are no whole pairs.
_GPT_OSS: dict[str, Any] = {
    "num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 24, "sliding_window": 13, "swiglu_limit": 1.5,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip
# Two layers of three have the window and the local rotary base; queries are scaled by another size than the heads'.
_GEMMA3: dict[str, Any] = {
    "head_dim": 24, "sliding_window": 13, "query_pre_attn_scalar": 40, "tie_word_embeddings": False,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe", "gpt_oss", "gemma3")


def build(family: str, **changes: Any) -> PreTrainedModel:
    """A random float32 model: qwen2 with biases, qwen3 with head norms and an odd head, llama tied and rope-scaled,
    qwen3_moe with experts in all layers but the first, gpt_oss with sinks, windows, biases and clamped experts, gemma3
    with windows, two rotary bases and four norms in a layer."""
    configs = {
        "qwen2": lambda: Qwen2Config(**_SHAPE | changes),
        "qwen3": lambda: Qwen3Config(**_SHAPE | {"head_dim": 24} | changes),
        "qwen3_moe": lambda: Qwen3MoeConfig(**_SHAPE | _EXPERTS | changes),
        "gpt_oss": lambda: GptOssConfig(**_SHAPE | _GPT_OSS | changes),
        "gemma3": lambda: Gemma3TextConfig(**_SHAPE | _GEMMA3 | changes),
        "mistral": lambda: MistralConfig(**_SHAPE | changes),
        "llama": lambda: LlamaConfig(**_SHAPE | {"tie_word_embeddings": True, "rope_parameters": _LLAMA3} | changes),
    }
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(configs[family]()).float().eval()
    for module in model.modules():
        if hasattr(module, "limit"):  # of gpt-oss: transformers 5.17 does not read the field
            module.limit = model.config.swiglu_limit
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.add_(torch.randn_like(parameter) * 2)
            if "bias" in name or "norm" in name:  # transformers starts them at 0 and 1, which would hide a swap
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def save(model: PreTrainedModel, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    return directory


def small_runner(model_dir: Path, **changes: Any) -> TorchRunner:
    """On the CPU, with blocks of 8 tokens, for five sequences. ``changes``: arguments of RunnerArgs."""
    values = {"device": "cpu", "tokens_per_block": 8, "num_blocks": 64, "max_batch_size": 5} | changes
    return create_runner(RunnerArgs(model_dir=model_dir, **values))


def random_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def reference_tokens(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """What transformers' generate gives greedily."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@dataclass(eq=False)
class Playing:
    """One sequence under way."""

    slot: int
    prompt: list[int]
    block_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    computed: int = 0  # tokens whose KV is in the pool
    output: list[int] = field(default_factory=list)
    is_first: bool = True
    results: list[Sampled] = field(default_factory=list)
    more_blocks: list[list[int]] = field(default_factory=list)  # of the layer groups behind the first

    def share(self, limit: int) -> ScheduledSequence:
        """The next at most ``limit`` tokens to compute."""
        tokens = self.prompt + self.output
        new = tokens[self.computed : self.computed + limit]
        return ScheduledSequence(
            self.slot, self.is_first, new, self.computed, [self.block_ids, *self.more_blocks],
            self.computed + len(new) == len(tokens),
            resolve_sampling(self.sampling), self.prompt, self.output, self.seed, self._banned(),
        )  # fmt: skip

    def _banned(self) -> tuple[int, ...]:
        return self.stop_ids if len(self.output) < (self.sampling.min_tokens or 0) else ()

    def take(self, share: ScheduledSequence, sampled: Sampled) -> None:
        self.is_first = False
        self.computed += len(share.new_token_ids)
        self.results.append(sampled)
        if sampled.token_id is not None:
            self.output.append(sampled.token_id)


class Player:
    """Hands out slots and shuffled blocks; runs steps of any mix."""

    def __init__(self, runner: ModelRunner, *, seed: int = 0) -> None:
        self.runner = runner
        self._free = list(range(runner.num_blocks))
        random.Random(seed).shuffle(self._free)
        self._next_slot = 0

    def blocks(self, num_tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-num_tokens // self.runner.geometry.tokens_per_block))]

    def add(self, prompt: list[int], *, room: int = 64, **more: Any) -> Playing:
        """``room``: how many tokens may be generated."""
        playing = self.add_in(self._next_slot, prompt, len(prompt) + room, **more)
        self._next_slot += 1
        return playing

    def add_in(self, slot: int, prompt: list[int], num_tokens: int, **more: Any) -> Playing:
        """``num_tokens``: those that the sequence has blocks for."""
        first, *others = (self.blocks(num_tokens) for _ in self.runner.geometry.groups)
        return Playing(slot, prompt, first, more_blocks=others, **more)

    def step(self, playing: Sequence[Playing], *, chunk: int = 10_000) -> None:
        shares = [(one, one.share(chunk)) for one in playing]
        shares.sort(key=lambda pair: not (pair[1].samples and pair[1].start > 0 and len(pair[1].new_token_ids) == 1))
        results = self.runner.launch(Batch([share for _, share in shares])).results()
        for (one, share), sampled in zip(shares, results, strict=True):
            assert (sampled.token_id is not None) == share.samples
            one.take(share, sampled)

    def finish(self, playing: Sequence[Playing], count: int, *, chunk: int = 10_000) -> list[list[int]]:
        """Steps all of them until each has ``count`` tokens; those still in their prompt mix with those decoding."""
        while open_ := [one for one in playing if len(one.output) < count]:
            self.step(open_, chunk=chunk)
        return [one.output for one in playing]
