"""Which files are the weights: transformers' own resolution is the oracle, over directories of every mixture."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.modeling_utils import _get_resolved_checkpoint_files

from trtx.checkpoint.weight_index import (
    check_read_by_pattern,
    check_weights,
    stored_tensors,
    weight_files,
    without_weights,
)
from trtx.errors import UsageError

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
# Everything that was seen beside a model's weights, and the ways in which the weights themselves may lie.
FILES = (
    "model.safetensors", "pytorch_model.bin", "consolidated.safetensors", "adapter_model.safetensors",
    "adapter_model.bin", "optimizer.safetensors", "optimizer.pt", "model.fp16.safetensors", "other.safetensors",
    "model.safetensors.index.json", "pytorch_model.bin.index.json", "model.fp16.safetensors.index.json", *SHARDS,
    "pytorch_model-00001-of-00001.bin", "weights/part.safetensors", "tf_model.h5", "model.gguf", "training_args.bin",
)  # fmt: skip
INDEXED = {
    "model.safetensors.index.json": [SHARDS, ("model.safetensors",), ("weights/part.safetensors", SHARDS[0])],
    "pytorch_model.bin.index.json": [("pytorch_model-00001-of-00001.bin",)],
    "model.fp16.safetensors.index.json": [("model.fp16.safetensors",)],
}


def theirs(directory: Path, named: str | None = None) -> list[Path]:
    """What transformers loads; none where it finds nothing."""
    try:
        files, _ = _get_resolved_checkpoint_files(
            str(directory), None, None, None, None, False, transformers_explicit_filename=named
        )
    except OSError:
        return []
    return [Path(file) for file in files or ()]


def write(directory: Path, names: list[str], chosen: random.Random) -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in INDEXED:
            weight_map = {f"tensor.{number}": shard for number, shard in enumerate(chosen.choice(INDEXED[name]))}
            path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        elif chosen.random() < 0.15:
            path.symlink_to(directory / "gone")  # as a cache that was cleaned leaves them
        elif chosen.random() < 0.15:
            (directory / f"blob-{path.name}").write_bytes(b"")
            path.symlink_to(directory / f"blob-{path.name}")
        else:
            path.write_bytes(b"")


def test_the_files_are_those_that_transformers_loads(tmp_path: Path) -> None:
    chosen = random.Random(26)
    kinds = set()
    for number in range(300):
        directory = tmp_path / str(number)
        directory.mkdir()
        names = chosen.sample(FILES, chosen.randint(0, len(FILES) // 2))
        write(directory, names, chosen)
        found = weight_files(directory)
        assert found == theirs(directory), names
        kinds.add((bool(found), bool(found) and found[0].suffix, len(found) > 1, all(map(Path.is_file, found))))
    assert len(kinds) >= 6, kinds


@pytest.mark.parametrize("named", ["consolidated.safetensors", "weights/other.safetensors.index.json"])
def test_a_file_that_the_config_names_is_the_one(tmp_path: Path, named: str) -> None:
    write(tmp_path, ["model.safetensors", "consolidated.safetensors"], random.Random(1))
    (tmp_path / "weights").mkdir()
    index = {"metadata": {}, "weight_map": {"a": "consolidated.safetensors"}}
    (tmp_path / "weights" / "other.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": named}))
    assert weight_files(tmp_path) == theirs(tmp_path, named) == [tmp_path / "consolidated.safetensors"]


def test_files_of_a_distributed_checkpoint_are_all_of_them_and_refused(tmp_path: Path) -> None:
    from transformers.distributed.checkpoint import _get_resolved_distributed_checkpoint_files

    for name in ("shard-00001-model-00001-of-00001.safetensors", "model.safetensors"):
        (tmp_path / name).write_bytes(b"")
    files = weight_files(tmp_path)
    assert list(map(str, files)) == _get_resolved_distributed_checkpoint_files(str(tmp_path))
    with pytest.raises(UsageError, match="holds a distributed checkpoint.*save_pretrained"):
        check_weights(tmp_path, files)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/model.safetensors", "a/../../b.safetensors"])
def test_an_index_does_not_lead_out_of_its_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UsageError, match="which is outside its directory"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["adapter_model.safetensors"], "an adapter: merge it"),
        (["consolidated.safetensors"], r"holds consolidated\.safetensors.*download the files model"),
        ([SHARDS[0]], r"without its index: download model\.safetensors\.index\.json"),
        (["model.fp16.safetensors"], r"a variant.*rename it to model\.safetensors"),
        (["model.gguf"], r"in llama\.cpp's format"),
        (["other.safetensors"], "holds other.safetensors, which transformers does not load"),
        ([], "download the whole checkpoint"),
    ],
)
def test_what_is_there_in_place_of_the_weights_is_named_with_its_own_cure(
    tmp_path: Path, names: list[str], said: str
) -> None:
    import re

    (tmp_path / "model.safetensors").mkdir()  # no file, and never named as one
    for name in names:
        (tmp_path / name).write_bytes(b"")
    assert weight_files(tmp_path) == theirs(tmp_path) == []
    assert re.search(said, without_weights(tmp_path))


def test_pickles_are_refused_with_the_way_to_safetensors(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UsageError, match=r"pytorch_model\.bin, a pickle.*save_pretrained"):
        check_weights(tmp_path, weight_files(tmp_path))


def test_a_link_whose_file_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    assert weight_files(tmp_path) == theirs(tmp_path) == []
    assert "model.safetensors links to a file that does not exist" in without_weights(tmp_path)


def test_one_module_says_which_files_are_the_weights() -> None:
    """The rule: no other looks for weights by a pattern, or names a file of them that it does not itself write."""
    root = Path(__file__).parents[3] / "trtx"
    looking = ("glob(", "pytorch_model", "consolidated")
    found = [
        str(path.relative_to(root))
        for path in sorted(root.rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if any(word in line for word in looking) and any(kind in line for kind in (".safetensors", ".bin", '"model*'))
    ]
    assert set(found) == {"checkpoint/weight_index.py"}


def test_an_engine_that_takes_every_file_gets_no_directory_of_which_it_would_load_others(tmp_path: Path) -> None:
    """TensorRT-LLM's HfWeightLoader: all of ``*.safetensors`` but "consolidated"."""
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    for name in ("consolidated", "adapter_model"):
        save_file({f"{name}.a": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    check_read_by_pattern(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    said = r"holds model-00001-of-00001\.safetensors besides its weights, such as model\.saf"
    with pytest.raises(UsageError, match=said):
        check_read_by_pattern(tmp_path)
    (tmp_path / "config.json").write_text('{"transformers_weights": "consolidated.safetensors"}')
    with pytest.raises(UsageError, match=r"weights in consolidated\.safetensors, where TensorRT-LLM does not look"):
        check_read_by_pattern(tmp_path)


def test_a_file_that_was_cut_is_refused_before_anything_reads_its_tensors(tmp_path: Path) -> None:
    whole = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(8)}, whole)
    assert stored_tensors(tmp_path)
    whole.write_bytes(whole.read_bytes()[:-3])
    with pytest.raises(UsageError, match="cannot be read as safetensors .its last 3 bytes are missing"):
        stored_tensors(tmp_path)
