"""The shapes of the ``synthetic:<shape>`` models: real configurations, as in the publishers' ``config.json`` files."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from trtx.checkpoint.decoder_shapes import gemma3, gpt_oss, llama3, mistral, qwen2, qwen3, qwen3_moe
from trtx.checkpoint.tokenizer import LLAVA_TOKENS, NUMBERED_TOKENS, QWEN_TOKENS, MediaTokens
from trtx.checkpoint.vision_shapes import (
    LLAVA_PROCESSOR,
    QWEN2_5_PROCESSOR,
    QWEN3_PROCESSOR,
    llava,
    qwen2_5_vl,
    qwen3_vl,
)
from trtx.errors import UsageError

PREFIX = "synthetic:"


@dataclass(frozen=True, slots=True)
class SyntheticShape:
    """One synthetic model.

    ``config``: ``config.json`` without the token ids, which the tokenizer determines. ``stored``: the weights are
    written as safetensors; otherwise the engine generates them from ``seed`` and ``config["initializer_range"]``.
    ``trained``: the repository contains the weights. ``media`` and ``processor``: the special tokens and the
    ``preprocessor_config.json`` of a multimodal model.
    """

    name: str
    summary: str
    config: Mapping[str, Any]
    media: MediaTokens | None = None
    processor: Mapping[str, Any] | None = None
    stored: bool = False
    trained: bool = False
    seed: int = 0


# float32: tests compare greedy tokens with transformers on a CPU, and rounding decides ties in bfloat16.
_SMALL: dict[str, Any] = {"torch_dtype": "float32", "max_position_embeddings": 8192}

_SHAPES = (
    SyntheticShape(
        "tiny",
        "Qwen3 architecture, 4 layers, 256 wide, random, float32: for a CPU",
        qwen3(256, 4, 8, 2, 768, tied=True) | _SMALL | {"head_dim": 32, "vocab_size": 4096, "rope_theta": 10000.0},
        stored=True,
    ),
    SyntheticShape(
        "tiny-trained",
        "Qwen3 architecture, 4 layers, 256 wide, trained on small tasks: what a machine without a GPU serves",
        # Every dimension a multiple of 128, so that every quantization format fits.
        qwen3(256, 4, 4, 2, 512, tied=True)
        | {"head_dim": 64, "vocab_size": 1024, "rope_theta": 10000.0, "max_position_embeddings": 8192},
        stored=True,
        trained=True,
    ),
    SyntheticShape(
        "tiny-tools",
        "Qwen3 architecture, 4 layers, 128 wide, trained to call tools and to think: for tests and demos on a CPU",
        qwen3(128, 4, 4, 2, 256, tied=True)
        | {"head_dim": 32, "vocab_size": 1024, "rope_theta": 10000.0, "max_position_embeddings": 8192},
        stored=True,
        trained=True,
    ),
    SyntheticShape(
        "tiny-qwen2",
        "Qwen2.5 architecture (biases on q, k, v), 3 layers, random, float32: for tests",
        qwen2(256, 3, 4, 2, 768, 4096) | _SMALL | {"rope_theta": 10000.0},
        stored=True,
    ),
    SyntheticShape(
        "tiny-llama",
        "Llama 3.1 architecture (llama3 rope scaling, untied head), 3 layers, random, float32: for tests",
        # 8,192 positions from an original 1,024, so that all three branches of the scaling apply.
        llama3(256, 3, 8, 2, 768, 4096)
        | _SMALL
        | {
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
                "rope_type": "llama3",
            }
        },
        stored=True,
    ),
    SyntheticShape(
        "tiny-moe",
        "Qwen3-MoE architecture (16 experts, 4 for a token), 3 layers, random, float32: for a CPU",
        qwen3_moe(128, 3, 4, 2, experts=16, per_token=4, expert_width=96)
        | _SMALL
        | {"head_dim": 32, "vocab_size": 4096, "rope_theta": 10000.0},
        stored=True,
    ),
    SyntheticShape(
        "tiny-gpt-oss",
        "gpt-oss architecture (sinks, windows of 32, 16 experts, 4 for a token), 4 layers, random, float32: for a CPU",
        # 8,192 positions from an original 1,024. The limit is low, so that it clamps some gates of random experts.
        gpt_oss(128, 4, 4, 2, experts=16, per_token=4, expert_width=96)
        | _SMALL
        | {
            "head_dim": 32,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 1024,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 10000.0,
            "sliding_window": 32,
            "swiglu_limit": 2.0,
            "vocab_size": 4096,
        },
        stored=True,
    ),
    SyntheticShape(
        "tiny-gemma3",
        "Gemma 3 architecture (windows of 32, four norms in a layer), 4 layers, random, float32: for a CPU",
        # The second and the fourth layer attend to all positions. An untied head, as that of a random model with a
        # tied one repeats the last token.
        gemma3(128, 4, 4, 2, 384)
        | _SMALL
        | {
            "head_dim": 32,
            "max_position_embeddings": 8192,
            "query_pre_attn_scalar": 32,
            "sliding_window": 32,
            "sliding_window_pattern": 2,
            "tie_word_embeddings": False,
            "vocab_size": 4096,
        },
        stored=True,
    ),
    SyntheticShape(
        "tiny-vl",
        "LLaVA architecture (CLIP tower, Qwen3 decoder), 2 layers each, random, float32: for tests",
        llava(qwen3(128, 2, 4, 2, 256, tied=True) | _SMALL | {"head_dim": 32, "vocab_size": 4096, "rope_theta": 1e4}),
        media=LLAVA_TOKENS,
        processor=LLAVA_PROCESSOR,
        stored=True,
    ),
    SyntheticShape(
        "tiny-vl-trained",
        "LLaVA architecture, trained on drawn images (colours, shapes, places, counts, digits): for a CPU",
        llava(
            qwen3(128, 3, 4, 2, 256, tied=True)
            | {"head_dim": 32, "vocab_size": 1024, "rope_theta": 10000.0, "max_position_embeddings": 8192},
            layers=3,
        ),
        media=NUMBERED_TOKENS,
        processor=LLAVA_PROCESSOR,
        stored=True,
        trained=True,
    ),
    SyntheticShape(
        "tiny-qwen2.5-vl",
        "Qwen2.5-VL architecture (positions of three parts), 2 layers, random, float32: for tests",
        qwen2_5_vl(
            qwen2(128, 2, 4, 2, 256, 4096) | _SMALL | {"rope_theta": 10000.0},
            [4, 6, 6],
            {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "window_size": 56},
            full=[1],
        ),
        media=QWEN_TOKENS,
        processor=QWEN2_5_PROCESSOR,
        stored=True,
    ),
    SyntheticShape(
        "tiny-qwen3-vl",
        "Qwen3-VL architecture (interleaved positions, deepstack), 3 layers, random, float32: for tests",
        qwen3_vl(
            qwen3(128, 3, 4, 2, 256, tied=True) | _SMALL | {"head_dim": 32, "vocab_size": 4096, "rope_theta": 1e4},
            [6, 5, 5],
            {"depth": 3, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "num_position_embeddings": 64},
            deepstack=[0, 1],
        ),
        media=QWEN_TOKENS,
        processor=QWEN3_PROCESSOR,
        stored=True,
    ),
    SyntheticShape(
        "qwen3-0.6b",
        "Qwen3-0.6B, random weights drawn on the device",
        qwen3(1024, 28, 16, 8, 3072, tied=True),
    ),
    SyntheticShape(
        "qwen3-1.7b",
        "Qwen3-1.7B, random weights drawn on the device",
        qwen3(2048, 28, 16, 8, 6144, tied=True),
    ),
    SyntheticShape(
        "qwen3-8b",
        "Qwen3-8B, random weights drawn on the device",
        qwen3(4096, 36, 32, 8, 12288, tied=False),
    ),
    SyntheticShape(
        "qwen3-32b",
        "Qwen3-32B, random weights drawn on the device",
        qwen3(5120, 64, 64, 8, 25600, tied=False),
    ),
    SyntheticShape(
        "qwen3-30b-a3b",
        "Qwen3-30B-A3B (128 experts, 8 for a token), random weights drawn on the device",
        qwen3_moe(2048, 48, 32, 4, experts=128, per_token=8, expert_width=768),
    ),
    SyntheticShape(
        "gpt-oss-20b",
        "gpt-oss-20b (32 experts, 4 for a token), experts in bfloat16, random weights drawn on the device",
        gpt_oss(2880, 24, 64, 8, experts=32, per_token=4, expert_width=2880),
    ),
    SyntheticShape(
        "gemma-3-1b",
        "Gemma 3 1B (windows of 512), random weights drawn on the device",
        gemma3(1152, 26, 4, 1, 6912),
    ),
    SyntheticShape(
        "llama-3.1-8b",
        "Llama-3.1-8B, random weights drawn on the device",
        llama3(4096, 32, 32, 8, 14336, 128256),
    ),
    SyntheticShape(
        "mistral-7b",
        "Mistral-7B-v0.1 (every layer attends to a window of 4,096), random weights drawn on the device",
        mistral(4096, 32, 32, 8, 14336, 4096),
    ),
    SyntheticShape(
        "qwen2.5-7b",
        "Qwen2.5-7B, random weights drawn on the device",
        qwen2(3584, 28, 28, 4, 18944, 152064),
    ),
    SyntheticShape(
        "qwen2.5-vl-7b",
        "Qwen2.5-VL-7B, random weights drawn on the device",
        qwen2_5_vl(
            qwen2(3584, 28, 28, 4, 18944, 152064) | {"max_position_embeddings": 128000},
            [16, 24, 24],
            {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16},
            full=[7, 15, 23, 31],
        ),
        media=QWEN_TOKENS,
        processor=QWEN2_5_PROCESSOR,
    ),
)
SHAPES: Mapping[str, SyntheticShape] = MappingProxyType({shape.name: shape for shape in _SHAPES})


def list_shapes() -> tuple[tuple[str, str], ...]:
    """Returns every ``synthetic:<shape>`` name with a one-line summary, for help texts."""
    return tuple((PREFIX + shape.name, shape.summary) for shape in _SHAPES)


def find_shape(name: str) -> SyntheticShape:
    """Returns the shape called ``name`` (without the prefix). Raises UsageError, which names the nearest shapes."""
    if name in SHAPES:
        return SHAPES[name]
    near = difflib.get_close_matches(name, SHAPES, n=3, cutoff=0.4) or list(SHAPES)
    raise UsageError(
        f"model {PREFIX + name!r} is no synthetic shape that trtx knows; "
        f"did you mean {' or '.join(PREFIX + n for n in near)}? Known: {', '.join(SHAPES)}"
    )
