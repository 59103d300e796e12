"""The decoder that a LLaVA nests: the tokens of transformers' whole model, from text alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from runner_player import Player, random_prompt, reference_tokens
from safetensors.torch import load_file, save_file
from transformers import LlavaForConditionalGeneration

from trtx.checkpoint import resolve_checkpoint
from trtx.errors import UsageError
from trtx.torch_engine.runner import RunnerArgs, create_runner


def play(path: Path, prompt: list[int], count: int) -> list[int]:
    runner = create_runner(
        RunnerArgs(model_dir=path, device="cpu", tokens_per_block=8, num_blocks=16, max_batch_size=1)
    )
    player = Player(runner)
    playing = player.add(prompt, room=count)
    player.finish([playing], count)
    runner.close()
    return list(playing.output)


@pytest.fixture(scope="module")
def model_dir() -> Path:
    torch.set_num_threads(1)
    return resolve_checkpoint("synthetic:tiny-vl").path


def copied(model_dir: Path, target: Path, rename: dict[str, str], **changes: object) -> Path:
    """With tensors under other names: the beginnings in ``rename``; "" leaves one out."""
    found = {}
    for name, value in load_file(model_dir / "model.safetensors").items():
        begin = next((begin for begin in rename if name.startswith(begin)), None)
        if begin is None:
            found[name] = value
        elif rename[begin]:
            found[rename[begin] + name.removeprefix(begin)] = value
    save_file(found, target / "model.safetensors")
    config = json.loads((model_dir / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_text_is_continued_as_by_transformers(model_dir: Path, tmp_path: Path) -> None:
    model = LlavaForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32)
    prompt = [token for token in random_prompt(40, seed=1) if token != model.config.image_token_id]
    expected = reference_tokens(model, prompt, 12)
    assert play(model_dir, prompt, 12) == expected
    # As its modules are called.
    rename = {"language_model.model.": "model.language_model.", "vision_tower.": "model.vision_tower."}
    assert play(copied(model_dir, tmp_path, rename), prompt, 12) == expected


@pytest.mark.parametrize(
    ("rename", "says"),
    [
        ({"language_model.model.": "model."}, "holds the tensor model."),
        ({"language_model.model.norm.": ""}, "lacks 1 tensors of LlavaForConditionalGeneration, first model.norm"),
        ({"vision_tower.": "audio_tower."}, "holds the tensor audio_tower."),
    ],
)
def test_tensors_that_have_no_place_and_those_that_lack_are_named(
    model_dir: Path, tmp_path: Path, rename: dict[str, str], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        create_runner(RunnerArgs(model_dir=copied(model_dir, tmp_path, rename), device="cpu", max_batch_size=1))


def test_a_text_model_has_no_place_for_a_tower(tmp_path: Path) -> None:
    source = resolve_checkpoint("synthetic:tiny").path
    tensors = load_file(source / "model.safetensors") | {"vision_tower.x": torch.zeros(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(
        UsageError, match=r"holds the tensor vision_tower\.x, but according to its config.json a Qwen3ForCausalLM"
    ):
        create_runner(RunnerArgs(model_dir=tmp_path, device="cpu", max_batch_size=1))
