"""Finds a model in the Hugging Face cache, or downloads it from the hub."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

from trtx.checkpoint.shapes import list_shapes
from trtx.checkpoint.weight_index import SINGLE, weight_files
from trtx.errors import UsageError

_DESCRIPTION = ("*.json", "*.jinja", "*.txt", "*.model")
_DOWNLOAD_TIMEOUT_S = 10.0


def hub_revision(directory: Path) -> str | None:
    """Returns the commit of a snapshot in the Hugging Face cache; None for any other directory."""
    return directory.name if directory.parent.name == "snapshots" else None


def load_hub() -> Any:
    """Imports ``huggingface_hub``, which reads its environment variables during the import.

    Raises UsageError if a variable that must be a number is not a number.
    """
    try:
        import huggingface_hub.constants
    except ValueError as error:
        names = ", ".join(sorted(name for name in os.environ if name.startswith("HF_"))) or "none"
        raise UsageError(
            f"huggingface_hub can't be loaded, as one of its variables can't be read ({error}); set here: {names}; "
            "correct it or unset it"
        ) from error
    return huggingface_hub


def fetch_from_hub(name: str, directory: Path, *, revision: str | None, with_weights: bool) -> None:
    """Downloads a model's files from the hub into ``directory``. Raises UsageError."""
    try:
        _snapshot(name, with_weights=with_weights, revision=revision, local_dir=directory)
    except UsageError:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")[:300]
        raise UsageError(
            f"model {name!r} can't be fetched from the hub into {directory} ({type(error).__name__}: {reason}); is its "
            "name right, does it need HF_TOKEN, and is the hub reached from here?"
        ) from error


def find_on_hub(name: str, *, with_weights: bool = True) -> Path:
    """Returns the directory of a model in the Hugging Face cache, after a download if needed. Raises UsageError."""
    found, reason = None, None
    try:
        found = _snapshot(name, with_weights=with_weights, local_files_only=True)
    except UsageError:
        raise
    except Exception as error:
        reason = error
    if found is not None and (not with_weights or _has_weights(found)):
        return found
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("1", "true", "yes", "on"):
        try:
            return _snapshot(name, with_weights=with_weights, etag_timeout=_DOWNLOAD_TIMEOUT_S)
        except UsageError:
            raise
        except Exception as error:
            reason = error
    if found is not None:  # cached without its weights: the caller reports it as for any directory
        return found
    raise UsageError(
        f"model {name!r} is not in the Hugging Face cache and cannot be fetched ({type(reason).__name__}); {ways_out()}"
    ) from reason


def _has_weights(directory: Path) -> bool:
    files = weight_files(directory)
    return bool(files) and all(file.is_file() for file in files)


def _snapshot(name: str, *, with_weights: bool, **options: Any) -> Path:
    """Fetches a model's files from the hub or its cache; of the weights only the files that transformers would load.

    The first download gets the single weight file if there is one, or the index, which lists the files to fetch next.
    """
    snapshot_download = load_hub().snapshot_download
    patterns = [*_DESCRIPTION, *([SINGLE] if with_weights else [])]
    directory = Path(snapshot_download(name, allow_patterns=patterns, **options))
    files = weight_files(directory) if with_weights else []
    if all(file.is_file() for file in files):
        return directory
    patterns += [glob.escape(file.relative_to(directory).as_posix()) for file in files]
    return Path(snapshot_download(name, allow_patterns=patterns, **options))


def ways_out() -> str:
    """Returns the end of a message about a model that can't be found: what to pass for it."""
    shapes = ", ".join(shape for shape, _ in list_shapes())
    return f"pass a directory with config.json, *.safetensors and tokenizer.json, or one of {shapes}"
