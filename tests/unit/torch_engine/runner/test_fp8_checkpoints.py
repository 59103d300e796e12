"""FP8 checkpoints as Qwen and Red Hat publish them: the runner against transformers with the format's arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_export import export
from runner_player import build
from scored_prompt import logprobs_of, reference
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, PreTrainedModel

from trtx.checkpoint.formats import NO_PRODUCTS
from trtx.checkpoint.model_config import read_model_config
from trtx.torch_engine.runner import RunnerArgs, create_runner
from trtx.torch_engine.runner.linear import PlainLinear
from trtx.torch_engine.runner.mlp import ExpertMlp
from trtx.torch_engine.runner.weights import load_weights

pytestmark = pytest.mark.slow

PUBLISHED = (
    ("fp8", "FP8_BLOCK_SCALES"),
    ("compressed-tensors", "FP8"),
    ("compressed-tensors", "FP8_PER_CHANNEL_PER_TOKEN"),
    ("compressed-tensors", "FP8_BLOCK_SCALES"),
)
# No size is a multiple of 128, and each has more than one block: q has 160 rows, k and v 80, gate and up 288 or 144.
RAGGED: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 288}
WHOLE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384}


def uneven(family: str, **changes: Any) -> PreTrainedModel:
    """A random model whose merged weights need different scales: those of k and up are much larger."""
    if family.startswith("qwen3"):
        changes["head_dim"] = 40
    if family == "qwen3_moe":
        changes["moe_intermediate_size"] = 144
    model = build(family, **RAGGED | changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("up_proj.weight") and "gate_up" not in name:
                parameter *= 4
            elif name.endswith("experts.gate_up_proj"):
                parameter[:, parameter.shape[1] // 2 :] *= 4
            elif name.endswith("k_proj.weight"):
                parameter *= 2
            if name.endswith(("down_proj", "down_proj.weight")):
                parameter /= 4
    return model


def logprobs(directory: Path, *, chunk: int = 10_000, **changes: Any) -> Tensor:
    """Log-probabilities of the prompt's own tokens."""
    values: dict[str, Any] = {"tokens_per_block": 8, "max_tokens": 512, "max_batch_size": 4} | changes
    return logprobs_of(create_runner(RunnerArgs(model_dir=directory, device="cpu", **values)), chunk=chunk)


def assert_equal(found: Tensor, expected: Tensor) -> None:
    """A last bit of a sum decides now and then to which float8 value an input is rounded, and later positions see it.

    Without any rounding of inputs the mean is above 0.2.
    """
    differences = (found - expected).abs()
    assert differences.quantile(0.25) < 1e-4 and differences.mean() < 0.05


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize(("exporter", "algorithm"), PUBLISHED)
def test_a_published_layout_computes_what_its_format_defines(
    tmp_path: Path, exporter: str, algorithm: str, family: str
) -> None:
    """q, k and v, and gate and up, have scales of their own; llama ties its head; qwen3_moe stores expert by expert."""
    exact = reference(uneven(family))
    expected = reference(export(uneven(family), algorithm, tmp_path, exporter=exporter))
    found = logprobs(tmp_path)
    assert_equal(found, expected)
    assert (expected - exact).abs().mean() > 0.01, "the export leaves the model as it was: nothing is compared"


def test_an_input_is_rounded_alike_in_chunks(tmp_path: Path) -> None:
    expected = reference(export(uneven("qwen3"), "FP8_BLOCK_SCALES", tmp_path, exporter="fp8"))
    assert_equal(logprobs(tmp_path, chunk=7), expected)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_dequantized_weights_are_those_that_transformers_dequantizes(tmp_path: Path, family: str) -> None:
    """Of whole blocks: transformers 5.23 derives a block's size from the number of blocks."""
    changes = {"moe_intermediate_size": 256} if family == "qwen3_moe" else {}
    export(build(family, **WHOLE, head_dim=64, **changes), "FP8_BLOCK_SCALES", tmp_path, exporter="fp8")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.float32
    )
    ours = load_weights(
        tmp_path,
        read_model_config(tmp_path),
        device=torch.device("cpu"),
        dtype=torch.float32,
        scaled_products=NO_PRODUCTS,
    )
    for layer, own in zip(theirs.model.layers, ours.layers, strict=True):
        attention = layer.self_attn
        merged = torch.cat([getattr(attention, f"{name}_proj").weight for name in "qkv"])
        assert isinstance(own.qkv, PlainLinear) and isinstance(own.output, PlainLinear)
        assert torch.equal(own.qkv.weight, merged) and torch.equal(own.output.weight, attention.o_proj.weight)
        if isinstance(own.mlp, ExpertMlp):
            assert torch.equal(own.mlp.weights.gate_up, layer.mlp.experts.gate_up_proj)
            assert torch.equal(own.mlp.weights.down, layer.mlp.experts.down_proj)
    assert any(isinstance(own.mlp, ExpertMlp) for own in ours.layers) == (family == "qwen3_moe")
