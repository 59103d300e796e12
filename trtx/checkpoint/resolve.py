"""Resolves a model name to a :class:`Checkpoint`. A name is a directory, ``synthetic:<shape>`` or a hub name."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path
from typing import Any

from trtx.checkpoint.documents import CONFIG
from trtx.checkpoint.facts import Checkpoint, read_checkpoint, read_config
from trtx.checkpoint.model_config import DRAWN_WEIGHTS
from trtx.checkpoint.shapes import PREFIX, find_shape, list_shapes
from trtx.checkpoint.synthetic import make_synthetic
from trtx.checkpoint.weight_index import SINGLE, check_weights, weight_files, without_weights
from trtx.errors import UsageError

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_DESCRIPTION = ("*.json", "*.jinja", "*.txt", "*.model")
_DOWNLOAD_TIMEOUT_S = 10.0


def default_model(*, on_gpu: bool) -> str:
    """Returns the model to serve if the user names none."""
    return PREFIX + ("qwen3-0.6b" if on_gpu else "tiny-trained")


def resolve_checkpoint(name: str, *, on_gpu: bool = False, cache_dir: Path | None = None) -> Checkpoint:
    """Finds the checkpoint called ``name``; downloads or generates it if needed.

    ``name``: a directory, ``synthetic:<shape>``, a hub name such as ``Qwen/Qwen3-0.6B``, or empty for
    :func:`default_model` of ``on_gpu``. ``cache_dir``: the directory of synthetic checkpoints, instead of
    ``$TRTX_CACHE/checkpoints`` or ``~/.cache/trtx/checkpoints``. Raises UsageError.
    """
    name = name or default_model(on_gpu=on_gpu)
    if name.startswith(PREFIX):
        shape = find_shape(name.removeprefix(PREFIX))
        return _from_directory(make_synthetic(shape, cache_dir), shape.name)
    directory = Path(name).expanduser()
    if directory.exists():
        return _from_directory(directory, directory.resolve().name)
    if name.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(name):
        raise UsageError(f"model {_shown(name)} is no directory on this machine; {_ways_out()}")
    return _from_directory(_find_on_hub(name), name)


def describe_checkpoint(name: str) -> Checkpoint:
    """Resolves a model that another machine serves, as :func:`resolve_checkpoint` does but without its weights.

    The weights need not be on this machine, and they are not downloaded from the hub. Raises UsageError.
    """
    directory = Path(name).expanduser()
    if name.startswith(PREFIX):
        return resolve_checkpoint(name)
    if not directory.exists():
        if name.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(name):
            raise UsageError(f"model {_shown(name)} is no directory on this machine; {_ways_out()}")
        return read_checkpoint(_find_on_hub(name, with_weights=False), name)
    if not (directory / CONFIG).is_file():
        raise UsageError(f"model directory {str(directory)!r} lacks {CONFIG}; {_ways_out()}")
    return read_checkpoint(directory.resolve(), directory.resolve().name)


def hub_revision(directory: Path) -> str | None:
    """Returns the commit of a snapshot in the Hugging Face cache; None for any other directory."""
    return directory.name if directory.parent.name == "snapshots" else None


def load_hub() -> Any:
    """Imports ``huggingface_hub``, which reads its environment variables during the import.

    Raises UsageError if a variable that must be a number is none.
    """
    try:
        import huggingface_hub.constants
    except ValueError as error:
        said = ", ".join(sorted(name for name in os.environ if name.startswith("HF_"))) or "none"
        raise UsageError(
            f"huggingface_hub can't be loaded, as one of its variables can't be read ({error}); set here: {said}; "
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
        said = next(iter(str(error).splitlines()), "")[:300]
        raise UsageError(
            f"model {name!r} can't be fetched from the hub into {directory} ({type(error).__name__}: {said}); is its "
            "name right, does it need HF_TOKEN, and is the hub reached from here?"
        ) from error


def _from_directory(directory: Path, served_model_name: str) -> Checkpoint:
    if not directory.is_dir():
        raise UsageError(f"model {str(directory)!r} is a file; expected the directory that holds its config.json")
    if missing := [name for name in (CONFIG, "tokenizer.json") if not (directory / name).is_file()]:
        raise UsageError(f"model directory {str(directory)!r} lacks {', '.join(missing)}; {_ways_out()}")
    if odd := next((path for path in sorted(directory.iterdir()) if _has_no_end(path)), None):
        raise UsageError(
            f"{odd} is a pipe, a device or a socket, and a model's files are read whole; replace it with a file"
        )
    files = weight_files(directory)
    check_weights(directory, files)
    if not files and DRAWN_WEIGHTS not in read_config(directory):  # with the key, the engine generates the weights
        raise UsageError(without_weights(directory))
    return read_checkpoint(directory.resolve(), served_model_name)


def _has_no_end(path: Path) -> bool:
    """Whether reading ``path`` could block or never end, because it is neither a regular file nor a directory."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _shown(name: str) -> str:
    return "that is given as an address" if "://" in name else repr(name)  # a URL may contain a token


def _find_on_hub(name: str, *, with_weights: bool = True) -> Path:
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
        f"model {name!r} is not in the Hugging Face cache and cannot be fetched ({type(reason).__name__}); "
        f"{_ways_out()}"
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


def _ways_out() -> str:
    shapes = ", ".join(shape for shape, _ in list_shapes())
    return f"pass a directory with config.json, *.safetensors and tokenizer.json, or one of {shapes}"
