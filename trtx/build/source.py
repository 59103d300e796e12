"""What a build is made from, identified by content: the same checkpoint is the same source wherever it lies."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtx.checkpoint import Checkpoint, resolve_checkpoint
from trtx.checkpoint.facts import read_config
from trtx.checkpoint.quantization import read_modelopt_file
from trtx.checkpoint.synthetic import default_cache_dir
from trtx.checkpoint.weight_index import weight_files

_SHA256 = re.compile(r"[0-9a-f]{64}")
_REVISION = re.compile(r"[0-9a-f]{40}")
_NOT_TAKEN_ALONG = (".index.json", "adapter_config.json")


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint and what identifies it.

    ``name``: as it was asked for. ``revision``: the hub's commit, or None. ``weights_hash``: SHA-256 over the weight
    files' own, or over the configuration and seed that weights are drawn from. ``files_hash``: over all other files
    that a build takes along.
    """

    name: str
    checkpoint: Checkpoint
    config: dict[str, Any]
    revision: str | None
    weights_hash: str
    files_hash: str

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def other_files(self) -> tuple[Path, ...]:
        return _other_files(self.path)


def read_source(model: str, *, on_gpu: bool) -> Source:
    """Finds the checkpoint called ``model`` and hashes it; reads each byte of its weights, once a file.

    Raises UsageError for a model that isn't there, whose hf_quant_config.json can't be read, and the like.
    """
    checkpoint = resolve_checkpoint(model, on_gpu=on_gpu)
    config = dict(read_config(checkpoint.path))
    if not config.get("quantization_config") and (quantization := read_modelopt_file(checkpoint.path)) is not None:
        config["quantization_config"] = quantization
    parent = checkpoint.path
    revision = parent.name if parent.parent.name == "snapshots" and _REVISION.fullmatch(parent.name) else None
    return Source(
        name=model or checkpoint.served_model_name,
        checkpoint=checkpoint,
        config=config,
        revision=revision,
        weights_hash=_weights_hash(checkpoint.path, config),
        files_hash=_combined((file.name, _hash_bytes(file)) for file in _other_files(checkpoint.path)),
    )


def _other_files(path: Path) -> tuple[Path, ...]:
    """Configuration and tokenizer: every file beside the weights that an engine may read. No code, no documents, no
    index of weights, and no adapter's, which would be applied to what is built."""
    kinds = (".json", ".jinja", ".txt", ".model")
    others = (file for file in path.iterdir() if file.is_file() and file.suffix in kinds)
    return tuple(sorted(file for file in others if not file.name.endswith(_NOT_TAKEN_ALONG)))


def _weights_hash(path: Path, config: dict[str, Any]) -> str:
    files = weight_files(path)
    if not files:
        return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()  # the seed is in it
    return _combined((file.relative_to(path).as_posix(), _hash_weights(file)) for file in files)


def _combined(hashes: Any) -> str:
    return hashlib.sha256(json.dumps(sorted(hashes)).encode()).hexdigest()


def _hash_weights(file: Path) -> str:
    """SHA-256 of a file. The hub's cache names its files by it; any other file is read once for its size and times."""
    blob = file.resolve()
    if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name):
        return blob.name
    status = blob.stat()
    identity = f"{blob}\n{status.st_dev}\n{status.st_ino}\n{status.st_size}\n{status.st_mtime_ns}\n{status.st_ctime_ns}"
    noted = default_cache_dir().parent / "weight-hashes" / hashlib.sha256(identity.encode()).hexdigest()
    with contextlib.suppress(OSError):
        known = noted.read_text(encoding="ascii")
        if _SHA256.fullmatch(known):
            return known
    digest = _hash_bytes(file)
    with contextlib.suppress(OSError):  # a cache that can't be written costs time, nothing else
        noted.parent.mkdir(parents=True, exist_ok=True)
        noted.write_text(digest, encoding="ascii")
    return digest


def _hash_bytes(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
