"""A source is its content: hashes see every byte that decides a build, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from trtx.build.manifest import key_of
from trtx.build.source import read_source
from trtx.checkpoint import resolve_checkpoint
from trtx.errors import UsageError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTX_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve_checkpoint("synthetic:tiny-trained").path, tmp_path / "model"))


def test_a_copy_under_another_name_is_the_same_source(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "README.md").write_text("a document is no part of a build")
    first, second = read_source(str(model), on_gpu=False), read_source(str(copy), on_gpu=False)
    assert (first.weights_hash, first.files_hash) == (second.weights_hash, second.files_hash)
    assert first.checkpoint.served_model_name != second.checkpoint.served_model_name


def test_one_changed_byte_of_the_weights_is_another_source(model: Path) -> None:
    before = read_source(str(model), on_gpu=False)
    with (model / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, 2)
        last = weights.read(1)[0]
        weights.seek(-1, 2)
        weights.write(bytes([last ^ 1]))
    after = read_source(str(model), on_gpu=False)
    assert before.weights_hash != after.weights_hash
    assert before.files_hash == after.files_hash


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"])
def test_a_changed_file_beside_the_weights_is_another_source(model: Path, name: str) -> None:
    before = read_source(str(model), on_gpu=False)
    (model / name).write_text((model / name).read_text(encoding="utf-8") + " ", encoding="utf-8")
    after = read_source(str(model), on_gpu=False)
    assert before.files_hash != after.files_hash
    assert before.weights_hash == after.weights_hash


def test_drawn_weights_are_identified_by_configuration_and_seed() -> None:
    small, large = (read_source(f"synthetic:qwen3-{size}", on_gpu=True) for size in ("0.6b", "1.7b"))
    assert not small.checkpoint.has_weights
    assert small.weights_hash != large.weights_hash
    assert small.weights_hash == read_source("synthetic:qwen3-0.6b", on_gpu=True).weights_hash


def test_a_snapshot_of_the_hub_has_its_revision_and_its_blobs_are_not_read(model: Path, tmp_path: Path) -> None:
    revision, digest = "0123456789abcdef0123456789abcdef01234567", "ab" * 32
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / revision
    blobs.mkdir()
    shutil.copytree(model, snapshot)
    (snapshot / "model.safetensors").rename(blobs / digest)
    (snapshot / "model.safetensors").symlink_to(blobs / digest)
    source = read_source(str(snapshot), on_gpu=False)
    assert source.revision == revision
    assert read_source(str(model), on_gpu=False).revision is None
    (blobs / digest).write_bytes((blobs / digest).read_bytes() + b" ")  # the hub's cache never does
    assert read_source(str(snapshot), on_gpu=False).weights_hash == source.weights_hash


def test_modelopts_own_file_says_that_a_checkpoint_is_quantized(model: Path) -> None:
    (model / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert read_source(str(model), on_gpu=False).config["quantization_config"] == {"quant_algo": "NVFP4"}
    (model / "hf_quant_config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"hf_quant_config.json is no ModelOpt quantization config"):
        read_source(str(model), on_gpu=False)


def test_a_key_follows_content_and_not_the_order_of_fields() -> None:
    assert key_of({"a": 1, "b": {"c": 2, "d": 3}}) == key_of({"b": {"d": 3, "c": 2}, "a": 1})
    assert key_of({"a": 1}) != key_of({"a": "1"})


def test_what_lies_beside_the_weights_is_not_taken_along(tmp_path: Path) -> None:
    """Another index, an adapter, a second copy: the build has the weights that transformers would load."""
    from trtx.build.contents import take_over, weight_bytes

    whole = resolve_checkpoint("synthetic:tiny").path
    model = Path(shutil.copytree(whole, tmp_path / "model"))
    (model / "weights").mkdir()
    (model / "model.safetensors").rename(model / "weights" / "part.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "weights/part.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("adapter_config.json", "pytorch_model.bin.index.json", "consolidated.safetensors"):
        (model / name).write_text("{}")
    before = read_source(str(model), on_gpu=False)
    taken = tmp_path / "taken"
    taken.mkdir()
    take_over(before, taken)
    after = read_source(str(taken), on_gpu=False)
    assert (after.weights_hash, after.files_hash) == (before.weights_hash, before.files_hash)
    assert weight_bytes(before, taken) == (whole / "model.safetensors").stat().st_size
    assert not {"adapter_config.json", "pytorch_model.bin.index.json", "consolidated.safetensors"} & {
        file.name for file in taken.iterdir()
    }
