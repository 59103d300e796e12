"""The source of a build, identified by content, so that a checkpoint is the same source at any path."""

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
    """A checkpoint and its identity.

    ``name``: the requested name. ``revision``: the hub's commit, or None. ``weights_hash``: the SHA-256 over the hashes
    of the weight files, or over the configuration and seed of generated weights. ``files_hash``: the SHA-256 over all
    other files that a build copies.
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
    """Finds the checkpoint called ``model`` and hashes it. Each weight file is read completely, but only once ever.

    Raises UsageError, for example if the model does not exist or its hf_quant_config.json can't be read.
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
    """Returns the files besides the weights that an engine may read: configuration and tokenizer.

    It excludes code, documents, weight indexes, and adapters, which would be applied to the build.
    """
    kinds = (".json", ".jinja", ".txt", ".model")
    others = (file for file in path.iterdir() if file.is_file() and file.suffix in kinds)
    return tuple(sorted(file for file in others if not file.name.endswith(_NOT_TAKEN_ALONG)))


def _weights_hash(path: Path, config: dict[str, Any]) -> str:
    files = weight_files(path)
    if not files:
        return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()  # config contains the seed
    return _combined((file.relative_to(path).as_posix(), _hash_weights(file)) for file in files)


def _combined(hashes: Any) -> str:
    return hashlib.sha256(json.dumps(sorted(hashes)).encode()).hexdigest()


def _hash_weights(file: Path) -> str:
    """Returns the SHA-256 of a file.

    In the hub's cache it is the file's name. The hash of any other file is computed once and cached under its path,
    size and timestamps.
    """
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
    with contextlib.suppress(OSError):  # if the cache can't be written, the next build hashes the file again
        noted.parent.mkdir(parents=True, exist_ok=True)
        noted.write_text(digest, encoding="ascii")
    return digest


def _hash_bytes(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
