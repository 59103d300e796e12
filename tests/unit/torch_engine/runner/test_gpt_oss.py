"""gpt-oss: what only it has (sinks, MXFP4 experts), and that no way of computing it changes its tokens.

Its tokens are compared with transformers' in ``test_runner_models.py`` and ``test_runner_windows.py`` too.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from engine_player import assert_equal, served, workload
from runner_player import Player, build, random_prompt, reference_tokens, save, small_runner
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from trtx.checkpoint import read_model_config
from trtx.errors import UsageError
from trtx.memory import MemoryDevice, plan_memory
from trtx.torch_engine.core.speculation.drafters import NGramDrafter
from trtx.torch_engine.core.speculation.lengths import DraftLengths
from trtx.torch_engine.core.speculation.sources import LookupDrafts
from trtx.torch_engine.core.speculation.speculation import Speculation
from trtx.torch_engine.runner import TorchRunner

pytestmark = pytest.mark.slow

EXPERTS = "model.layers.{}.mlp.experts.{}_proj{}"
CPU = MemoryDevice("CPU", 64 << 30, 64 << 30, is_gpu=False)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build("gpt_oss")


@pytest.fixture(scope="module")
def checkpoint(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("checkpoint"))


new_runner = partial(small_runner, num_blocks=80, cpu_threads=1)


def tokens_of(runner: TorchRunner, prompts: list[list[int]], count: int = 16) -> list[list[int]]:
    player = Player(runner)
    return player.finish([player.add(prompt, room=count) for prompt in prompts], count)


@pytest.mark.parametrize("lacking", ["sinks", "router_bias", "gate_up_bias", "down_bias", "clamp"])
def test_each_part_of_a_layer_makes_tokens(model: PreTrainedModel, checkpoint: Path, lacking: str) -> None:
    """Else nothing here would show that the engine computes it."""
    runner, prompt = new_runner(checkpoint), random_prompt(50, 5)
    weights = runner._decoder._weights
    layers = []
    for layer in weights.layers:
        if lacking == "sinks":
            layers.append(replace(layer, sinks=None))
        else:
            layers.append(replace(layer, mlp=replace(layer.mlp, weights=replace(layer.mlp.weights, **{lacking: None}))))
    expected = [reference_tokens(model, prompt, 16)]
    assert tokens_of(runner, [prompt]) == expected
    runner._decoder._weights = replace(weights, layers=tuple(layers))
    assert tokens_of(new_runner(checkpoint), [prompt]) == expected
    assert tokens_of(runner, [prompt]) != expected


def write_mxfp4(model: PreTrainedModel, directory: Path) -> None:
    """Gives the model random experts of MXFP4, and writes them as published: blocks and scales, in different files."""
    save(model, directory)
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    scales: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        for kind in ("gate_up", "down"):
            weight = getattr(layer.mlp.experts, f"{kind}_proj")  # [experts, columns, rows]
            count, columns, rows = weight.shape
            blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
            powers = torch.randint(121, 125, (count, rows, columns // 32), dtype=torch.uint8, generator=generator)
            with torch.no_grad():
                weight.copy_(convert_moe_packed_tensors(blocks, powers, dtype=torch.float32))
            del tensors[EXPERTS.format(index, kind, "")]
            tensors[EXPERTS.format(index, kind, "_blocks")] = blocks
            scales[EXPERTS.format(index, kind, "_scales")] = powers
    files = {"model-00001-of-00002.safetensors": scales, "model-00002-of-00002.safetensors": tensors}
    for name, held in files.items():
        save_file(held, directory / name, metadata={"format": "pt"})
    weight_map = {tensor: name for name, held in files.items() for tensor in held}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "model.safetensors").unlink()
    excluded = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    file = directory / "config.json"
    config = json.loads(file.read_text()) | {
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": excluded}
    }
    file.write_text(json.dumps(config))


def test_mxfp4_experts_are_those_that_transformers_dequantizes(tmp_path: Path) -> None:
    model = build("gpt_oss")
    write_mxfp4(model, tmp_path)
    experts = read_model_config(tmp_path).experts
    assert experts is not None and experts.is_mxfp4
    runner = new_runner(tmp_path)
    for own, layer in zip(runner._decoder._weights.layers, model.model.layers, strict=True):
        gate_up = layer.mlp.experts.gate_up_proj.transpose(1, 2)
        assert torch.equal(own.mlp.weights.gate_up, torch.cat((gate_up[:, 0::2], gate_up[:, 1::2]), dim=1))
        assert torch.equal(own.mlp.weights.down, layer.mlp.experts.down_proj.transpose(1, 2))
    prompts = [random_prompt(length, length) for length in (1, 30, 60)]
    assert tokens_of(runner, prompts) == [reference_tokens(model, prompt, 16) for prompt in prompts]


def test_the_plan_counts_dequantized_experts_and_says_so(model: PreTrainedModel, tmp_path: Path) -> None:
    plain = save(model, tmp_path / "plain")
    write_mxfp4(build("gpt_oss"), tmp_path / "mxfp4")
    limits = {"max_batch_size": 3, "max_num_tokens": 64}
    one, other = (plan_memory(path, "agg", limits, engine="torch", device=CPU) for path in (plain, tmp_path / "mxfp4"))
    assert "MXFP4 dequantized to float32" in str(other) and str(other).replace("MXFP4 dequantized to ", "") == str(one)


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("model.layers.1.mlp.experts.down_proj_scales", "lacks the tensor model.layers.1.mlp.experts.down_proj_scales"),
        ("model.layers.2.mlp.experts.gate_up_proj_blocks", "model.layers.2.mlp.experts.gate_up_proj_blocks; download"),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", "lacks 16 tensors of GptOssForCausalLM, first model.layers.0"),
        (
            "model.layers.0.self_attn.sinks",
            "lacks 1 tensors of GptOssForCausalLM, first model.layers.0.self_attn.sinks",
        ),
    ],
)
def test_a_tensor_that_the_checkpoint_lacks_is_named(tmp_path: Path, lost: str, words: str) -> None:
    write_mxfp4(build("gpt_oss"), tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    file = tmp_path / json.loads(index.read_text())["weight_map"][lost]
    kept = {name: value for name, value in load_file(file).items() if name != lost}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(UsageError, match=words):
        new_runner(tmp_path)


def test_a_misshapen_stack_is_refused(tmp_path: Path) -> None:
    write_mxfp4(build("gpt_oss"), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 64}))
    with pytest.raises(UsageError, match=r"has shape \[8, .*3\], and config.json wants \[8, .*2\]"):
        new_runner(tmp_path)


def n_grams() -> Speculation:
    drafter = NGramDrafter(max_matching_ngram_size=2, is_keep_all=True, is_use_oldest=True, is_public_pool=True)
    return Speculation(LookupDrafts(drafter), DraftLengths(3, schedule={5: 3}), is_asynchronous=False)


def test_overlap_preemption_padded_forwards_and_drafts_do_not_change_tokens(checkpoint: Path) -> None:
    wishes = workload(1)
    expected, _ = served(new_runner(checkpoint), wishes, overlap=False)
    found, paused = served(new_runner(checkpoint, num_blocks=26), wishes, overlap=True)
    assert_equal(found, expected, wishes)
    assert paused, "nothing was preempted"
    padded = new_runner(checkpoint, merges_passes=True, pass_sizes=(3, 8, 24))
    assert_equal(served(padded, wishes, overlap=True)[0], expected, wishes)
    drafts = n_grams()
    found, _ = served(new_runner(checkpoint, max_draft_len=3), wishes, overlap=True, speculation=drafts)
    assert_equal(found, expected, wishes)
    assert sum(drafts.counts.accepted)
