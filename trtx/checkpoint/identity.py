"""Which files a checkpoint is: one hash that is the same wherever the same files lie, in seconds at any size.

A file of up to 64 MiB is hashed whole: every text file, and the weights of a small model. Of a larger one the hash
takes its size, its safetensors header (name, type, shape and place of every tensor) and 64 samples of 16 KiB at even
distances, the first and the last bytes among them. So it is a *sampled* hash: another model, training, quantization or
a file that was cut changes it; a change of weights that falls between all samples of a large file does not.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from trtx.checkpoint.weight_index import MAX_HEADER_BYTES, weight_files
from trtx.errors import UsageError

WHOLE_BYTES = 64 << 20
SAMPLES, SAMPLE_BYTES = 64, 16 << 10
_TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")  # configuration, tokenizer, index, code of the model
_OF_THE_BUILD = "manifest.json"  # when and how `trtx build` made it: no engine reads it


@dataclass(frozen=True, slots=True)
class Identity:
    """``sampled_sha256``: over names and contents, as the module says. ``revision``: the commit on the hub, None where
    the directory is no snapshot in its cache."""

    revision: str | None
    count: int
    total_bytes: int
    sampled_sha256: str


def identify_model(directory: Path) -> Identity:
    """Of the weights that the index names and of all text files. Raises UsageError for one that can't be read."""
    return _identify(directory, {*weight_files(directory), *_text_files(directory)})


def identify_tokenizer(directory: Path) -> Identity:
    """Of the text files alone: prompts don't depend on weights. Raises UsageError."""
    return _identify(directory, _text_files(directory))


def _text_files(directory: Path) -> set[Path]:
    return {
        path
        for pattern in _TEXT_FILES
        for path in directory.glob(pattern)
        if path.is_file() and path.name != _OF_THE_BUILD
    }


def _identify(directory: Path, paths: set[Path]) -> Identity:
    named = sorted((path.relative_to(directory).as_posix(), path) for path in paths)
    digest = hashlib.sha256()
    total = 0
    for name, path in named:
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                content = _content_hash(file, size, has_header=path.suffix == ".safetensors")
        except OSError as error:
            raise UsageError(
                f"{path} can't be read ({error.strerror or error}), and the run's record would not say which model "
                "was measured; put it right"
            ) from error
        digest.update(f"{name}\0{size}\0{content}\n".encode())
        total += size
    return Identity(_revision(directory), len(named), total, digest.hexdigest())


def _content_hash(file: BufferedReader, size: int, *, has_header: bool) -> str:
    if size <= WHOLE_BYTES:
        return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256()
    if has_header:
        (length,) = struct.unpack("<Q", file.read(8))
        digest.update(file.read(min(length, MAX_HEADER_BYTES)))
    for offset in sample_offsets(size):
        file.seek(offset)
        digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def sample_offsets(size: int) -> Sequence[int]:
    """Where the samples of a file of ``size`` bytes begin: even distances, from its first byte to its last."""
    return [number * (size - SAMPLE_BYTES) // (SAMPLES - 1) for number in range(SAMPLES)]


def _revision(directory: Path) -> str | None:
    """The hub's cache keeps a snapshot in ``models--<owner>--<name>/snapshots/<commit>``."""
    is_snapshot = directory.parent.name == "snapshots" and directory.parent.parent.name.startswith("models--")
    return directory.name if is_snapshot else None
