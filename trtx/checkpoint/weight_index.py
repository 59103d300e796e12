"""Which files hold a checkpoint's weights, as transformers 5.23 decides it, and their headers. No tensor is read.

Everything that needs the weights asks here: the engine, the memory plan, the model's identity, builds and exports.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from trtx.checkpoint.documents import CONFIG, config_fields, read_object
from trtx.errors import UsageError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 256 << 20  # the format allows 100 MB; anything longer is no header
_PICKLE, _PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_SAFETENSORS, _INDEX_SUFFIX = ".safetensors", ".index.json"
_NAMED_BY_CONFIG = "transformers_weights"
_WIDE = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_OF_RANKS = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")  # is_sharded_checkpoint of transformers
# What else a directory may hold in place of its weights, and what to do about it; the first match holds.
_INSTEAD = (
    (r"adapter_model\..*", "an adapter: merge it into its base model (merge_and_unload of PEFT), and save that"),
    (r"consolidated.*", "the form of the model's own maker: download the files that are named model*.safetensors too"),
    (r"model-\d+-of-\d+\.safetensors", f"a part of the weights without their index: download {INDEX} too"),
    (r"model\..+\.safetensors", f"a variant, which transformers reads when it is asked for alone: name it {SINGLE}"),
    (r".*\.gguf", "the form of llama.cpp: download the checkpoint in the form of Hugging Face"),
    (r".*\.(safetensors|bin|pth?)", f"which transformers does not look for: name it {SINGLE} if it is one"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file, as its header has it. ``nbytes``: in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def weight_files(directory: Path) -> list[Path]:
    """Those that transformers would load from ``directory``, there or not; none where weights are drawn, or missing.

    ``_get_resolved_checkpoint_files`` of its modeling_utils decides: what config.json names, else one file of
    safetensors, else the index, else the same two as pickles. Others beside them, such as a second copy of the
    weights, an adapter or an optimizer's state, are none of the model's. Raises UsageError for an index that is none.
    """
    if ranks := _files_of_ranks(directory):
        return ranks
    found = weights_entry(directory)
    if found is None:
        return []
    if not found.name.endswith(_INDEX_SUFFIX):
        return [found]
    listed = read_object(found, "an index of weights").get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) and name for name in listed.values()):
        raise UsageError(
            f"{found} is no index of weights: no weight_map from tensors to files; download the checkpoint again"
        )
    names = sorted(set(listed.values()))
    for name in names:
        _check_inside(name, found)
    return [directory / name for name in names]


def adapter_beside(directory: Path) -> Path | None:
    """The adapter of PEFT in a model's directory, which is no part of the model's weights; None: there is none."""
    names = ("adapter_model.safetensors", "adapter_model.bin")
    return next((directory / name for name in names if (directory / name).is_file()), None)


def weights_entry(directory: Path) -> Path | None:
    """The one file that transformers opens first: the weights, or their index. None where it would find neither."""
    if (named := _named_by_config(directory)) is not None:
        return directory / named
    for name in (SINGLE, INDEX, _PICKLE, _PICKLE_INDEX):
        if (directory / name).is_file():
            return directory / name
    return None


def _named_by_config(directory: Path) -> str | None:
    if not (directory / CONFIG).is_file():
        return None
    config = config_fields(directory)
    if not config.has(_NAMED_BY_CONFIG):
        return None
    named = config.word(_NAMED_BY_CONFIG, "a .safetensors file or its index")
    if not named.endswith((_SAFETENSORS, _SAFETENSORS + _INDEX_SUFFIX)):
        config.refuse(_NAMED_BY_CONFIG, "a .safetensors file or its index")
    _check_inside(named, config.file)
    return named


def _check_inside(name: str, source: Path | str) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise UsageError(f"{source} names {name!r:.80}, outside of its directory; expected files in it")


def _files_of_ranks(directory: Path) -> list[Path]:
    """Of a distributed checkpoint, as transformers takes any directory with a file of such a name."""
    files = sorted(directory.glob("*" + _SAFETENSORS))
    return files if any(_OF_RANKS.match(file.name) for file in files) else []


def check_weights(directory: Path, files: Iterable[Path]) -> None:
    """Raises UsageError where the :func:`weight_files` of ``directory`` are not all there, or not what trtx reads."""
    files = list(files)
    absent = [file for file in files if not file.is_file()]
    if absent:
        entry = weights_entry(directory)
        said = "its configuration" if entry in absent or entry is None else entry.name
        more = f" and {len(absent) - 1} more" if absent[1:] else ""
        what = f"{absent[0].relative_to(directory)}{more}"
        raise UsageError(
            f"model directory {str(directory)!r} lacks {what}, which {said} names; download the checkpoint whole"
        )
    if any(_OF_RANKS.match(file.name) for file in files):
        raise UsageError(
            f"model directory {str(directory)!r} holds a distributed checkpoint, {files[0].name} for instance; load "
            "it with transformers, and write it anew with save_pretrained"
        )
    if pickles := [file for file in files if file.suffix != _SAFETENSORS]:
        raise UsageError(
            f"model directory {str(directory)!r} holds its weights as {pickles[0].name}, a pickle, which trtx does not "
            f"read; write them anew as safetensors: AutoModelForCausalLM.from_pretrained({str(directory)!r}, "
            f"dtype='auto').save_pretrained({str(directory)!r})"
        )


def check_read_by_pattern(directory: Path) -> None:
    """Raises UsageError where an engine that loads every ``*.safetensors`` of ``directory``, the names with
    "consolidated" left out, as TensorRT-LLM's HfWeightLoader does, would load other weights than transformers."""
    own = weight_files(directory)
    loaded = [file for file in sorted(directory.glob("*" + _SAFETENSORS)) if "consolidated" not in file.name]
    if own and (missed := [file for file in own if file not in loaded]):
        raise UsageError(
            f"model directory {str(directory)!r} has its weights in {missed[0].relative_to(directory)}, where "
            f"TensorRT-LLM does not look; move them up, and name them such as {SINGLE}"
        )
    names = (stored_tensors(directory) or {}).keys()
    for file in loaded:
        if file not in own and names & read_header(file).keys():
            raise UsageError(
                f"model directory {str(directory)!r} holds {file.name} beside its weights, {own[0].name} first, and "
                "TensorRT-LLM would load both; take away the one that is not the model's"
            )


def without_weights(directory: Path) -> str:
    """Why a directory of which :func:`weight_files` is empty has none, with what it holds instead and what to do."""
    dead = [name for name in (SINGLE, INDEX) if (directory / name).is_symlink()]
    lacks = f"model directory {str(directory)!r} has no safetensors weights"
    if dead:
        return f"{lacks}: {dead[0]} links to a file that is not there; download the checkpoint whole"
    names = sorted(file.name for file in directory.iterdir() if not file.is_dir()) if directory.is_dir() else []
    for pattern, advice in _INSTEAD:
        if found := next((name for name in names if re.fullmatch(pattern, name)), None):
            return f"{lacks}, neither {SINGLE} nor {INDEX}; it holds {found}, {advice}"
    return f"{lacks}; expected {SINGLE} or {INDEX}: download the checkpoint whole, or use synthetic:<shape>"


def stored_tensors(directory: Path) -> dict[str, StoredTensor] | None:
    """Every tensor of the weights by its name, in the order of the files; None without weights, or without all of them.

    Of a tensor that two files hold the last one counts, as for transformers. Raises UsageError for a file that can't
    be read.
    """
    files = weight_files(directory)
    if not files or not all(file.is_file() for file in files):
        return None
    check_weights(directory, files)
    found: dict[str, StoredTensor] = {}
    for file in files:
        for name, entry in read_header(file).items():
            begin, end = entry["data_offsets"]
            found[name] = StoredTensor(file, entry["dtype"], tuple(entry.get("shape", ())), end - begin)
    return found


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Each tensor's ``dtype``, ``shape`` and ``data_offsets`` by its name. Raises UsageError for a file that is none.

    The file begins with the header's length, 8 bytes little-endian, then JSON.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        ends = 0
        for entry in header.values():
            begin, end = entry["data_offsets"]
            if not (isinstance(begin, int) and isinstance(end, int) and isinstance(entry["dtype"], str)):
                raise ValueError("a tensor without dtype or offsets")
            ends = max(ends, end)
        if (short := 8 + length + ends - path.stat().st_size) > 0:
            raise ValueError(f"its last {short:,} bytes are not there")
    except (OSError, ValueError, struct.error, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as safetensors ({str(error)[:200]}); download it again") from error
    return dict(header)


def stored_dtype(directory: Path) -> str:
    """float32, bfloat16 or float16: as the first tensor of such a kind is stored, bfloat16 where there is none.

    What a config that names no dtype means, for the plan and the engine alike; transformers 5 looks there too.
    """
    for path in weight_files(directory):
        if path.suffix == _SAFETENSORS and path.is_file():
            kinds = (_WIDE.get(entry["dtype"]) for entry in read_header(path).values())
            if (found := next(filter(None, kinds), None)) is not None:
                return found
    return "bfloat16"
