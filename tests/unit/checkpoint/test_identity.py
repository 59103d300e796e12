"""Which files a checkpoint is: the hash follows names and contents, in the bounds that it says of itself."""

from __future__ import annotations

import itertools
import json
import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtx.checkpoint.identity import SAMPLE_BYTES, WHOLE_BYTES, identify_model, identify_tokenizer, sample_offsets
from trtx.errors import UsageError

HEADER = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
LARGE = WHOLE_BYTES + 4096


def checkpoint(directory: Path, *, size: int = 1000, header: bytes = HEADER) -> Path:
    """Zeros behind a header: a sparse file, whatever its size."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(size)
    return directory


def overwrite(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\x01")


def test_the_same_files_are_the_same_wherever_they_lie(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "first")
    copy = shutil.copytree(first, tmp_path / "elsewhere" / "copy")  # with other times
    assert identify_model(first) == identify_model(copy)
    assert (identify_model(first).count, identify_model(first).total_bytes) == (2, 1002)


def test_whatever_changes_in_a_small_checkpoint_changes_its_hash(tmp_path: Path) -> None:
    hashes = {"as it was": identify_model(checkpoint(tmp_path / "0")).sampled_sha256}
    configured = checkpoint(tmp_path / "configured")
    (configured / "config.json").write_text("{ }")
    hashes["another config"] = identify_model(configured).sampled_sha256
    for file, offset in (("model.safetensors", 500), ("model.safetensors", 999)):
        changed = checkpoint(tmp_path / f"{file}-{offset}")
        overwrite(changed / file, offset)
        hashes[f"byte {offset} of {file}"] = identify_model(changed).sampled_sha256
    more = checkpoint(tmp_path / "more")
    (more / "chat_template.jinja").write_text("")
    hashes["one more file"] = identify_model(more).sampled_sha256
    named = checkpoint(tmp_path / "named")
    (named / "model.safetensors").rename(named / "other.safetensors")
    hashes["another name"] = identify_model(named).sampled_sha256
    assert len(set(hashes.values())) == len(hashes), hashes


@pytest.mark.parametrize("name", ["README.md", "manifest.json"])
def test_what_no_engine_reads_does_not_count(tmp_path: Path, name: str) -> None:
    directory = checkpoint(tmp_path / "model")
    before = identify_model(directory)
    (directory / name).write_text("{}")
    assert identify_model(directory) == before


def test_prompts_depend_on_the_tokenizer_and_not_on_weights(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model")
    before = identify_tokenizer(directory)
    overwrite(directory / "model.safetensors", 500)
    assert identify_tokenizer(directory) == before
    (directory / "tokenizer.json").write_text("{}")
    assert identify_tokenizer(directory) != before


def test_of_a_large_file_size_header_and_samples_count_and_what_lies_between_does_not(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path / "large", size=LARGE) / "model.safetensors"
    before = identify_model(weights.parent).sampled_sha256
    second = sample_offsets(LARGE)[1]
    overwrite(weights, second - 1)  # said so in the module: the hash is a sampled one
    assert identify_model(weights.parent).sampled_sha256 == before
    found = {before}
    for offset in (second, LARGE - 1, 9):
        overwrite(weights, offset)
        found.add(identify_model(weights.parent).sampled_sha256)
    longer = checkpoint(tmp_path / "longer", size=LARGE + 1)
    other = checkpoint(tmp_path / "header", size=LARGE, header=HEADER.replace(b"F32", b"I32"))
    found |= {identify_model(one).sampled_sha256 for one in (longer, other)}
    assert len(found) == 6


def test_a_header_longer_than_the_first_sample_counts_whole(tmp_path: Path) -> None:
    header = HEADER + b" " * (3 * SAMPLE_BYTES)
    directory = checkpoint(tmp_path / "large", size=LARGE, header=header)
    before = identify_model(directory)
    overwrite(directory / "model.safetensors", len(HEADER) + 2 * SAMPLE_BYTES)
    assert identify_model(directory) != before


@given(st.integers(WHOLE_BYTES + 1, 1 << 50))
def test_samples_reach_from_the_first_byte_to_the_last_at_even_distances(size: int) -> None:
    offsets = sample_offsets(size)
    assert offsets[0] == 0 and offsets[-1] + SAMPLE_BYTES == size
    steps = {after - before for before, after in itertools.pairwise(offsets)}
    assert max(steps) - min(steps) <= 1 and min(steps) >= SAMPLE_BYTES


def test_a_snapshot_of_the_hub_has_its_revision(tmp_path: Path) -> None:
    snapshot = checkpoint(tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "c1899de2")
    assert identify_model(snapshot).revision == "c1899de2"
    assert identify_model(checkpoint(tmp_path / "snapshots" / "mine")).revision is None


def test_a_weight_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model")
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"w": "gone.safetensors"}}')
    with pytest.raises(UsageError, match=r"gone\.safetensors can't be read"):
        identify_model(directory)
