"""Identifies the files of a checkpoint by one hash, which does not depend on their location and takes only seconds.

A file of up to 64 MiB is hashed completely: every text file, and the weights of a small model. For a larger file the
hash covers the size, the safetensors header (name, type, shape and offset of every tensor) and 64 samples of 16 KiB at
even distances, including the first and the last bytes. It is therefore a *sampled* hash: another model, training or
quantization changes it, and so does a truncated file. A change of weights between the samples of a large file does not.
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
_TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")  # configuration, tokenizer, index, the model's code
_OF_THE_BUILD = "manifest.json"  # records when and how `trtx build` made the checkpoint; no engine reads it


@dataclass(frozen=True, slots=True)
class FilesIdentity:
    """The identity of a set of files.

    ``sampled_sha256``: the hash of names and contents that the module describes. ``revision``: the commit on the hub;
    None if the directory is not a snapshot in the hub's cache.
    """

    revision: str | None
    count: int
    total_bytes: int
    sampled_sha256: str


def identify_model(directory: Path) -> FilesIdentity:
    """Identifies the weight files in the index and all text files. Raises UsageError if one can't be read."""
    return _identify(directory, {*weight_files(directory), *_text_files(directory)})


def identify_tokenizer(directory: Path) -> FilesIdentity:
    """Identifies the text files only, because prompts don't depend on weights. Raises UsageError."""
    return _identify(directory, _text_files(directory))


def _text_files(directory: Path) -> set[Path]:
    return {
        path
        for pattern in _TEXT_FILES
        for path in directory.glob(pattern)
        if path.is_file() and path.name != _OF_THE_BUILD
    }


def _identify(directory: Path, paths: set[Path]) -> FilesIdentity:
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
    return FilesIdentity(_revision(directory), len(named), total, digest.hexdigest())


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
    """Returns the offsets of the samples of a file: at even distances, from the first byte to the last."""
    return [number * (size - SAMPLE_BYTES) // (SAMPLES - 1) for number in range(SAMPLES)]


def _revision(directory: Path) -> str | None:
    """Returns the commit if ``directory`` is ``models--<owner>--<name>/snapshots/<commit>`` of the hub's cache."""
    is_snapshot = directory.parent.name == "snapshots" and directory.parent.parent.name.startswith("models--")
    return directory.name if is_snapshot else None
