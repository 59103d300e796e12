"""The content of a build's directory besides the quantized weights: the model's own files, and engine configs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import yaml

from trtx.build.formats import FORMATS, NO_FORMAT
from trtx.build.source import Source
from trtx.build.store import check_space
from trtx.checkpoint.documents import CONFIG
from trtx.checkpoint.facts import is_tied, read_config, text_config
from trtx.checkpoint.model_config import DRAWN_WEIGHTS
from trtx.checkpoint.quantization import MODELOPT_FILE
from trtx.checkpoint.weight_index import weight_files, weights_entry
from trtx.config import ResolvedEngineConfig

ENGINE_CONFIGS = "engine_configs"
_OWN_BYTES = 1 << 20  # engine configs, manifest, log
_OF_THE_EXPORT = (CONFIG, MODELOPT_FILE)


def bytes_needed(source: Source, form: str) -> int:
    """Returns the approximate size of a build on disk. Unquantized weights are hard links if the file system allows."""
    beside = sum(file.stat().st_size for file in source.other_files) + _OWN_BYTES
    if form == NO_FORMAT:
        return beside
    width = source.checkpoint.dtype_bytes
    parameters = source.checkpoint.weight_bytes // width
    text = text_config(source.config)
    heads = 1 if is_tied(source.config) else 2
    kept = min(parameters, heads * int(text["vocab_size"]) * int(text["hidden_size"]))
    return int((parameters - kept) * FORMATS[form].bytes_a_parameter + kept * width) + beside


def complete_export(source: Source, directory: Path) -> None:
    """Copies the source's configuration and tokenizer into the directory of an export.

    ModelOpt writes config.json in the format of the installed transformers (seen in 0.47 with transformers 5:
    ``rope_parameters``). An older transformers, such as TensorRT-LLM's, would read other values from it or none.
    Therefore config.json is the source's, with the export's ``quantization_config``.
    """
    quantization = read_config(directory)["quantization_config"]
    config = {key: value for key, value in source.config.items() if key != DRAWN_WEIGHTS}
    (directory / CONFIG).write_text(json.dumps(config | {"quantization_config": quantization}, indent=2) + "\n")
    for file in source.other_files:
        if file.name not in _OF_THE_EXPORT:
            shutil.copyfile(file, directory / file.name)
    for file in weight_files(directory):
        file.chmod(0o644)  # safetensors writes 0600


def complete_engine(source: Source, directory: Path) -> None:
    """Copies the tokenizer into the directory of a TensorRT engine, which has its own config.json."""
    for file in source.other_files:
        if not (directory / file.name).exists():
            shutil.copyfile(file, directory / file.name)


def take_over(source: Source, directory: Path) -> None:
    """Copies the whole checkpoint unchanged; weights become hard links if possible."""
    for file in source.other_files:
        shutil.copyfile(file, directory / file.name)
    files = weight_files(source.path)
    for file in files:
        blob, taken = file.resolve(), directory / file.relative_to(source.path)
        taken.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(blob, taken)
        except OSError:
            check_space(directory, blob.stat().st_size)
            shutil.copyfile(blob, taken)
    index = weights_entry(source.path)
    if index is not None and index not in files:
        shutil.copyfile(index, directory / index.name)


def write_engine_configs(configs: Iterable[ResolvedEngineConfig], directory: Path, *, built_for: str) -> None:
    """Writes ``engine_configs/<role>.yaml``; the first lines state the source of each config."""
    folder = directory / ENGINE_CONFIGS
    folder.mkdir()
    for config in configs:
        lines = [f"# Resolved by trtx build, for {built_for}.", *(f"# {reason}" for reason in config.reasons)]
        if config.header is not None:
            header = yaml.safe_dump(config.header.model_dump(mode="json", exclude_none=True), default_flow_style=True)
            lines.append(f"# trtx: {' '.join(header.split())}")
        text = yaml.safe_dump(config.values, sort_keys=False)
        (folder / f"{config.role}.yaml").write_text("\n".join([*lines, text]), encoding="utf-8")


def weight_bytes(source: Source, directory: Path) -> int:
    """Returns the size of the weight files, or of the weights that the engine will generate."""
    return sum(file.stat().st_size for file in weight_files(directory)) or source.checkpoint.weight_bytes
