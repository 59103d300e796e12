"""Generates synthetic checkpoints once, in a cache that concurrent processes and ``kill -9`` never leave incomplete."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtx.checkpoint.documents import CONFIG
from trtx.checkpoint.facts import read_config, text_config
from trtx.checkpoint.model_config import DRAWN_WEIGHTS, read_model_config
from trtx.checkpoint.shapes import SyntheticShape
from trtx.checkpoint.tokenizer import BOS, EOS_IDS, PAD, SPECIAL_TOKENS, TokenizerFiles, make_tokenizer
from trtx.checkpoint.towers import tower_tensors
from trtx.checkpoint.vision import TEXT, VISION
from trtx.checkpoint.weights import write_random_weights
from trtx.errors import UsageError

# The modules that determine a checkpoint's bytes. A hash of their source is part of each cached directory's name.
_GENERATOR = tuple(
    Path(__file__).with_name(f"{name}.py")
    for name in ("synthetic", "text", "tokenizer", "weights", "dense", "experts", "towers", "vision")
)
# ``tools/training/train_tiny.py`` writes to this directory, which is package data.
TRAINED_DIRECTORY = Path(__file__).with_name("tiny_trained")
_ABANDONED_S = 3600.0


def trained_directory(shape: SyntheticShape) -> Path:
    """Returns the directory of a shape whose trained weights are part of the package."""
    return Path(__file__).with_name(shape.name.replace("-", "_"))


def default_cache_dir() -> Path:
    """Returns ``$TRTX_CACHE/checkpoints``, or ``~/.cache/trtx/checkpoints`` if the variable is not set."""
    return Path(os.environ.get("TRTX_CACHE") or Path.home() / ".cache" / "trtx").expanduser() / "checkpoints"


def make_synthetic(shape: SyntheticShape, cache_dir: Path | None = None) -> Path:
    """Returns the directory of ``shape``, generated if it does not exist. Several processes may call it at once.

    Trained shapes are part of the package. Raises UsageError if the cache can't be written.
    """
    if shape.trained:
        return trained_directory(shape)
    cache = cache_dir or default_cache_dir()
    target = cache / f"{shape.name}-{_content_key(shape)}"
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=cache))
    except OSError as error:
        raise UsageError(
            f"cache directory {str(cache)!r} cannot be written ({error.strerror}); set TRTX_CACHE to one that can"
        ) from error
    _sweep(cache)
    try:
        making.chmod(0o755)
        _write(shape, making)
        _publish(making, target)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return target


def _publish(making: Path, target: Path) -> None:
    """Moves ``making`` to ``target`` atomically. If another process was faster, its target has the same bytes."""
    try:
        making.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def _sweep(cache: Path) -> None:
    """Removes the leftovers of killed processes: hidden directories that have not changed for an hour."""
    for left in cache.glob(".*-*-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)


def _content_key(shape: SyntheticShape) -> str:
    stated = [dict(shape.config), dict(shape.processor or {}), shape.seed, shape.stored]
    digest = hashlib.sha256(json.dumps(stated, sort_keys=True).encode())
    for module in _GENERATOR:
        digest.update(module.read_bytes())
    return digest.hexdigest()[:12]


def _write(shape: SyntheticShape, directory: Path) -> None:
    config = config_json(shape)
    text = text_config(config)
    tokenizer = make_tokenizer(int(text["vocab_size"]), int(text["max_position_embeddings"]), media=shape.media)
    write_model_files(config, tokenizer, directory)
    if shape.processor is not None:
        write_processor_files(shape.processor, directory)
    if shape.stored:
        write_random_weights(
            read_model_config(directory),
            tower_tensors(config),
            tokenizer.fragment_ids,
            shape.seed,
            directory / "model.safetensors",
        )


def config_json(shape: SyntheticShape) -> dict[str, Any]:
    ids = {
        "bos_token_id": SPECIAL_TOKENS.index(BOS),
        "eos_token_id": EOS_IDS[0],
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
    }
    config: dict[str, Any] = {**shape.config, **ids}
    if TEXT in config:
        config[TEXT] = {**config[TEXT], **ids}
    if not shape.stored and not shape.trained:
        config[DRAWN_WEIGHTS] = {"seed": shape.seed, "init_std": shape.config["initializer_range"]}
    return config


def write_processor_files(processor: Mapping[str, Any], directory: Path) -> None:
    """Writes the config files of transformers' image processor and processor."""
    rows = {"processor_class": processor["processor_class"]}
    if processor["processor_class"] == "LlavaProcessor":  # it counts CLIP's class token itself, and subtracts it
        config = read_config(directory)
        rows |= {
            "image_token": "<image>",
            "num_additional_image_tokens": 1,
            "patch_size": config[VISION]["patch_size"],
            "vision_feature_select_strategy": config["vision_feature_select_strategy"],
        }
    for name, value in (("preprocessor_config.json", processor), ("processor_config.json", rows)):
        (directory / name).write_text(json.dumps(dict(value), indent=2) + "\n", encoding="utf-8")


def write_model_files(config: dict[str, Any], tokenizer: TokenizerFiles, directory: Path) -> None:
    """Writes ``config.json``, ``generation_config.json`` and the tokenizer's files."""
    generation = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": list(EOS_IDS),
        "pad_token_id": config["pad_token_id"],
        "do_sample": False,
    }
    for name, value in ((CONFIG, config), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    tokenizer.write(directory)
