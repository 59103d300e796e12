"""Resolves a model name to a :class:`Checkpoint`. A name is a directory, ``synthetic:<shape>`` or a hub name."""

from __future__ import annotations

import re
from pathlib import Path

from trtx.checkpoint.documents import CONFIG
from trtx.checkpoint.facts import Checkpoint, read_checkpoint, read_config
from trtx.checkpoint.hub import find_on_hub, ways_out
from trtx.checkpoint.model_config import DRAWN_WEIGHTS
from trtx.checkpoint.shapes import PREFIX, find_shape
from trtx.checkpoint.synthetic import make_synthetic
from trtx.checkpoint.weight_index import check_weights, weight_files, without_weights
from trtx.errors import UsageError

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


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
        raise UsageError(f"model {_shown(name)} is not a directory on this machine; {ways_out()}")
    return _from_directory(find_on_hub(name), name)


def describe_checkpoint(name: str) -> Checkpoint:
    """Resolves a model that another machine serves, as :func:`resolve_checkpoint` does but without its weights.

    The weights need not be on this machine, and they are not downloaded from the hub. Raises UsageError.
    """
    directory = Path(name).expanduser()
    if name.startswith(PREFIX):
        return resolve_checkpoint(name)
    if not directory.exists():
        if name.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(name):
            raise UsageError(f"model {_shown(name)} is not a directory on this machine; {ways_out()}")
        return read_checkpoint(find_on_hub(name, with_weights=False), name)
    if not (directory / CONFIG).is_file():
        raise UsageError(f"model directory {str(directory)!r} lacks {CONFIG}; {ways_out()}")
    return read_checkpoint(directory.resolve(), directory.resolve().name)


def _from_directory(directory: Path, served_model_name: str) -> Checkpoint:
    if not directory.is_dir():
        raise UsageError(f"model {str(directory)!r} is a file; expected the directory that holds its config.json")
    if missing := [name for name in (CONFIG, "tokenizer.json") if not (directory / name).is_file()]:
        raise UsageError(f"model directory {str(directory)!r} lacks {', '.join(missing)}; {ways_out()}")
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
