"""An FP8 checkpoint as Qwen publishes them, made here: planned, refused, served in both modes, compared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from called import call
from quantized_export import export
from safetensors.torch import load_file, save_file
from topology_clients import post, trtx_serve
from transformers import AutoModelForCausalLM, PreTrainedModel

from trtx.checkpoint import resolve_checkpoint
from trtx.cli.app import run
from trtx.evals.fidelity import read_fidelity
from trtx.text import load_tokenizer

PROMPT = "The small red house stands near the old river, and " * 6
NEW_TOKENS = 12
EXACT = ("--set", "dtype=float32", "--set", "kv_cache_config.tokens_per_block=16")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """The checkpoint, and the model as transformers computes it with the format's arithmetic written out."""
    source = resolve_checkpoint("synthetic:tiny-trained").path
    directory = tmp_path_factory.mktemp("published") / "tiny-trained-FP8"
    shutil.copytree(source, directory)
    model = AutoModelForCausalLM.from_pretrained(str(source), dtype=torch.float32).eval()
    stated = json.loads((source / "config.json").read_text())
    reference = export(model, "FP8_BLOCK_SCALES", directory, exporter="fp8")
    path = directory / "config.json"
    quantization = json.loads(path.read_text())["quantization_config"]
    path.write_text(json.dumps(stated | {"quantization_config": quantization}))
    return directory, reference


def greedy(directory: Path, model: PreTrainedModel) -> str:
    tokenizer = load_tokenizer(directory)
    ids = torch.tensor([tokenizer.encode(PROMPT).ids])
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return str(tokenizer.decode(ids[0, -NEW_TOKENS:].tolist()))


@pytest.mark.parametrize("mode", ["agg", "disagg"])
def test_it_is_served_with_the_tokens_of_its_format_also_from_a_cached_prefix(
    made: tuple[Path, PreTrainedModel], mode: str
) -> None:
    directory, model = made
    expected = greedy(directory, model)
    with trtx_serve("--model", str(directory), "--engine", "torch", "--mode", mode, *EXACT) as serve:
        plan = serve.wait_ready(120)
        body: dict[str, Any] = {"model": plan.model, "prompt": PROMPT, "max_tokens": NEW_TOKENS}
        found = [post(plan.url, "/v1/completions", body | {"temperature": 0, "ignore_eos": True}) for _ in range(2)]
    assert [status for status, _ in found] == [200, 200]
    assert [answer["choices"][0]["text"] for _, answer in found] == [expected] * 2
    again = found[1][1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert again > 0


@pytest.mark.proof
def test_served_it_is_its_own_reference(made: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    """A last bit of a sum decides now and then to which float8 value an input is rounded, so it is nearly so."""
    argv = ["eval", "fidelity", "--model", str(made[0]), "--prompts", "12", "--osl", "8", "-o", str(tmp_path)]
    assert run([*argv, "--max-kl", "0.5", "--min-agreement", "0.7"]) == 0
    (run_dir,) = tmp_path.iterdir()
    found = read_fidelity(run_dir, "agg")
    part = found.part("text") if found is not None else None
    assert part is not None and part.kl.value < 1e-3 and part.agreement.value > 0.97


def test_a_dry_run_says_what_is_dequantized_and_names_a_broken_scale(
    made: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    dry = ("serve", "--engine", "torch", "--port", "0", "--dry-run", "--model")
    done = call(*dry, str(made[0]))
    assert done.code == 0 and "FP8_BLOCK_SCALES dequantized to" in done.out + done.err
    broken = tmp_path / "broken"
    shutil.copytree(made[0], broken)
    tensors = load_file(broken / "model.safetensors")
    name = "model.layers.2.mlp.down_proj.weight_scale_inv"
    tensors[name][1, 2] = float("nan")
    save_file(tensors, broken / "model.safetensors")
    done = call(*dry, str(broken))
    assert done.code == 2 and f"model.safetensors: tensor {name} holds a scale that is negative" in done.err
