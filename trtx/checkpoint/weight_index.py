"""Finds the weight files of a checkpoint by the rules of transformers 5.23, and reads their headers, but no tensor.

The engine, the memory plan, the model's identity, builds and exports all use this module.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

from trtx.checkpoint.documents import CONFIG, config_fields, read_object
from trtx.errors import UsageError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 256 << 20  # the format allows 100 MB
_PICKLE, _PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_SAFETENSORS, _INDEX_SUFFIX = ".safetensors", ".index.json"
_NAMED_BY_CONFIG = "transformers_weights"
_WIDE = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
STORED_DTYPES = {
    **_WIDE, "F64": "float64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
}  # fmt: skip
"""torch's names of the dtypes in headers, without the "torch." prefix."""
_OF_RANKS = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")  # is_sharded_checkpoint of transformers
# Files that a directory may hold instead of its weights, and what to do about each; the first match counts.
_INSTEAD = (
    (r"adapter_model\..*", "an adapter: merge it into its base model (PEFT's merge_and_unload) and save the result"),
    (r"consolidated.*", "which is in the model maker's own format: download the files model*.safetensors too"),
    (r"model-\d+-of-\d+\.safetensors", f"a part of the weights without its index: download {INDEX} too"),
    (r"model\..+\.safetensors", f"a variant, which transformers loads only if asked for it: rename it to {SINGLE}"),
    (r".*\.gguf", "which is in llama.cpp's format: download the checkpoint in Hugging Face's format"),
    (r".*\.(safetensors|bin|pth?)", f"which transformers does not load: rename it to {SINGLE} if it holds the weights"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The header entry of a tensor in a safetensors file. ``nbytes``: its size in the file, ``begin``: its place."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    begin: int  # bytes after the header


def weight_files(directory: Path) -> list[Path]:
    """Returns the files that transformers would load from ``directory``, whether they exist or not.

    The list is empty if weights are generated, or missing. As in ``_get_resolved_checkpoint_files`` of transformers'
    modeling_utils, it is the file that config.json names, else the single safetensors file, else the files in the
    index, else the same as pickles. Other files, such as a second copy of the weights, an adapter or an optimizer
    state, are ignored. Raises UsageError for an invalid index.
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
            f"{found} is not a weight index: it has no weight_map from tensors to files; download the checkpoint again"
        )
    names = sorted(set(listed.values()))
    for name in names:
        _check_inside(name, found)
    return [directory / name for name in names]


def adapter_beside(directory: Path) -> Path | None:
    """Returns the PEFT adapter in a model's directory, which does not belong to the model's weights, or None."""
    names = ("adapter_model.safetensors", "adapter_model.bin")
    return next((directory / name for name in names if (directory / name).is_file()), None)


def weights_entry(directory: Path) -> Path | None:
    """Returns the file that transformers opens first: the weights or their index; None if it would find neither."""
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
        raise UsageError(f"{source} names {name!r:.80}, which is outside its directory; expected files inside it")


def _files_of_ranks(directory: Path) -> list[Path]:
    """Returns the files of a distributed checkpoint: transformers treats any directory with such a file name as one."""
    files = sorted(directory.glob("*" + _SAFETENSORS))
    return files if any(_OF_RANKS.match(file.name) for file in files) else []


def check_weights(directory: Path, files: Iterable[Path]) -> None:
    """Raises UsageError if one of the :func:`weight_files` of ``directory`` is missing or has an unsupported format."""
    files = list(files)
    absent = [file for file in files if not file.is_file()]
    if absent:
        entry = weights_entry(directory)
        namer = "its configuration" if entry in absent or entry is None else entry.name
        more = f" and {len(absent) - 1} more" if absent[1:] else ""
        what = f"{absent[0].relative_to(directory)}{more}"
        raise UsageError(
            f"model directory {str(directory)!r} lacks {what}, which {namer} names; download the whole checkpoint"
        )
    if any(_OF_RANKS.match(file.name) for file in files):
        raise UsageError(
            f"model directory {str(directory)!r} holds a distributed checkpoint, such as {files[0].name}; load "
            "it with transformers and save it with save_pretrained"
        )
    if pickles := [file for file in files if file.suffix != _SAFETENSORS]:
        raise UsageError(
            f"model directory {str(directory)!r} has its weights in {pickles[0].name}, a pickle, which trtx does not "
            f"read; save them as safetensors: AutoModelForCausalLM.from_pretrained({str(directory)!r}, "
            f"dtype='auto').save_pretrained({str(directory)!r})"
        )


def check_read_by_pattern(directory: Path) -> None:
    """Raises UsageError if TensorRT-LLM would load other weights from ``directory`` than transformers.

    Its HfWeightLoader loads every ``*.safetensors`` file whose name does not contain "consolidated".
    """
    own = weight_files(directory)
    loaded = [file for file in sorted(directory.glob("*" + _SAFETENSORS)) if "consolidated" not in file.name]
    if own and (missed := [file for file in own if file not in loaded]):
        raise UsageError(
            f"model directory {str(directory)!r} has its weights in {missed[0].relative_to(directory)}, where "
            f"TensorRT-LLM does not look; move them into the directory itself, as {SINGLE}"
        )
    names = (stored_tensors(directory) or {}).keys()
    for file in loaded:
        if file not in own and names & read_header(file).keys():
            raise UsageError(
                f"model directory {str(directory)!r} holds {file.name} besides its weights, such as {own[0].name}, and "
                "TensorRT-LLM would load both; remove the file that does not belong to the model"
            )


def without_weights(directory: Path) -> str:
    """Returns a message for a directory without weights: what it holds instead, and what to do."""
    dead = [name for name in (SINGLE, INDEX) if (directory / name).is_symlink()]
    lacks = f"model directory {str(directory)!r} has no safetensors weights"
    if dead:
        return f"{lacks}: {dead[0]} links to a file that does not exist; download the whole checkpoint"
    names = sorted(file.name for file in directory.iterdir() if not file.is_dir()) if directory.is_dir() else []
    for pattern, advice in _INSTEAD:
        if found := next((name for name in names if re.fullmatch(pattern, name)), None):
            return f"{lacks}, neither {SINGLE} nor {INDEX}; it holds {found}, {advice}"
    return f"{lacks}; expected {SINGLE} or {INDEX}: download the whole checkpoint, or use synthetic:<shape>"


def stored_tensors(directory: Path) -> dict[str, StoredTensor] | None:
    """Returns every tensor of the weights by name, in the order of the files; None if weights are missing.

    If two files hold a tensor, the last one counts, as in transformers. Raises UsageError if a file can't be read.
    """
    files = weight_files(directory)
    if not files or not all(file.is_file() for file in files):
        return None
    check_weights(directory, files)
    found: dict[str, StoredTensor] = {}
    for file in files:
        for name, entry in read_header(file).items():
            begin, end = entry["data_offsets"]
            found[name] = StoredTensor(file, entry["dtype"], tuple(entry.get("shape", ())), end - begin, begin)
    return found


def read_data(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, bytes]]:
    """Yields the name and the data of small tensors, file by file in the order of their places.

    Raises UsageError if a file can't be read.
    """
    in_order = sorted(tensors.items(), key=lambda item: (item[1].file, item[1].begin))
    for path, group in groupby(in_order, key=lambda item: item[1].file):
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                for name, tensor in group:
                    file.seek(8 + length + tensor.begin)
                    yield name, file.read(tensor.nbytes)
        except (OSError, struct.error) as error:
            raise UsageError(f"{path} can't be read ({error}); download it again") from error


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Returns each tensor's ``dtype``, ``shape`` and ``data_offsets`` by name. Raises UsageError for an invalid file.

    The file begins with the length of the header (8 bytes, little-endian), followed by the header as JSON.
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
            raise ValueError(f"its last {short:,} bytes are missing")
    except (OSError, ValueError, struct.error, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as safetensors ({str(error)[:200]}); download it again") from error
    return dict(header)


def stored_dtype(directory: Path) -> str:
    """Returns the dtype of the first float32, bfloat16 or float16 tensor in the files; bfloat16 if there is none.

    Plan and engine use it for a config without a dtype, as transformers 5 does.
    """
    for path in weight_files(directory):
        if path.suffix == _SAFETENSORS and path.is_file():
            kinds = (_WIDE.get(entry["dtype"]) for entry in read_header(path).values())
            if (found := next(filter(None, kinds), None)) is not None:
                return found
    return "bfloat16"
