"""Odd model directories: planned, checked or refused with one sentence, before anything would start."""

from __future__ import annotations

import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from fuzzing import ODD_VALUES, ask, cases, judge

from trtx.checkpoint import resolve_checkpoint

pytestmark = pytest.mark.slow

_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
# Fields of other families, which a directory may have by mistake or by right.
_FIELDS: dict[str, Any] = {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "text_config": {"hidden_size": 64},
    "vision_config": {"hidden_size": 64, "depth": 2},
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 128,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 512,
    "num_nextn_predict_layers": 1,
    "trtx_synthetic": {"seed": 1},
    "auto_map": {"AutoModel": "x.Y"},
}
_QUANTIZED = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}
# The last is read whole, and refused before anything is built.
COMMANDS = (
    ["serve", "--dry-run", "--port", "0", "--engine", "torch", "--model", "model"],
    ["build", "--check", "model", "--gpu", "H100"],
    ["build", "model", "--quant", "fp8", "--config", "agg=no/such.yaml"],
)
OTHERS = (
    ["serve", "--dry-run", "--port", "0", "--engine", "paced", "--mode", "disagg", "--model", "model"],
    ["build", "--check", "model"],
    ["bench", "--dry-run", "--model", "model"],
)

# Whole files and fields that were seen to end in a traceback, by name.
CONFIGS: dict[str, dict[str, Any]] = {
    "heads in words": {"num_attention_heads": "four"},
    "no heads": {"num_attention_heads": None},
    "negative heads": {"num_attention_heads": -8},
    "zero heads": {"num_attention_heads": 0},
    "zero KV heads": {"num_key_value_heads": 0},
    "a billion layers": {"num_hidden_layers": 10**9},
    "negative layers": {"num_hidden_layers": -1},
    "layers that are true": {"num_hidden_layers": True},
    "rope_parameters is 5": {"rope_parameters": 5},
    "quantization_config is a list": {"quantization_config": [1]},
    "quantization_config is text": {"quantization_config": "fp8"},
    "architectures is text": {"architectures": "Qwen3ForCausalLM"},
    "architectures is 5": {"architectures": 5},
    "architectures is a map": {"architectures": {"a": 1}},
    "positions in words": {"max_position_embeddings": "many"},
    "layer_types is 5": {"layer_types": 5},
    "vision_config is text": {"vision_config": "x"},
    "text_config is empty": {"text_config": {}},
    "a vocabulary of 10**30": {"vocab_size": 10**30},
    "a dtype that is a list": {"dtype": ["bfloat16"], "torch_dtype": ["x"]},
}
TEXTS: dict[str, tuple[str, str]] = {
    "config.json is a list": ("config.json", "[]"),
    "config.json is empty": ("config.json", ""),
    "config.json is deep": ("config.json", "[" * 100_000),
    "config.json holds a long number": ("config.json", '{"hidden_size": ' + "9" * 5000 + "}"),
    "generation_config.json is broken": ("generation_config.json", "{"),
    "generation_config.json is a list": ("generation_config.json", "[1]"),
    "generation_config.json is deep": ("generation_config.json", "[" * 100_000),
    "tokenizer_config.json is broken": ("tokenizer_config.json", "{"),
    "tokenizer.json is empty": ("tokenizer.json", ""),
    "hf_quant_config.json is a list": ("hf_quant_config.json", "[]"),
    "hf_quant_config.json has odd values": ("hf_quant_config.json", '{"quantization": {"exclude_modules": 5}}'),
    "hf_quant_config.json names an odd format": ("hf_quant_config.json", '{"quantization": {"quant_algo": [1]}}'),
    "the index is a list": ("model.safetensors.index.json", "[]"),
    "the index names numbers": ("model.safetensors.index.json", '{"weight_map": {"a": 5}}'),
    "the index names mixed kinds": ("model.safetensors.index.json", '{"weight_map": {"a": 5, "b": "x"}}'),
    "the index names lists": ("model.safetensors.index.json", '{"weight_map": {"a": []}}'),
    "the index names a path above": ("model.safetensors.index.json", '{"weight_map": {"a": "../../../etc/passwd"}}'),
    "the index names a device": ("model.safetensors.index.json", '{"weight_map": {"a": "/dev/zero"}}'),
    "the index is deep": ("model.safetensors.index.json", "[" * 100_000),
}  # fmt: skip


@pytest.fixture
def model(odd_directory: Path) -> Path:
    directory = odd_directory / "model"
    directory.mkdir()
    source = resolve_checkpoint("synthetic:tiny").path
    for name in _FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    return directory


def _judge_all() -> None:
    for argv in COMMANDS:
        judge(argv, ask(argv))


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)
def test_a_config_that_describes_no_model_is_refused_with_a_sentence(model: Path, fields: dict[str, Any]) -> None:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(config | fields), encoding="utf-8")
    _judge_all()


@pytest.mark.parametrize(("name", "text"), TEXTS.values(), ids=TEXTS)
def test_a_file_that_is_none_is_refused_with_a_sentence(model: Path, name: str, text: str) -> None:
    (model / name).write_text(text, encoding="utf-8")
    _judge_all()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if (number + place) % 3 == 0 else pytest.mark.proof)
        for number, name in enumerate([*_FILES, "hf_quant_config.json", "model.safetensors.index.json"])
        for place, kind in enumerate(["missing", "directory", "fifo", "loop", "zero", "binary", "cut"])
    ],
)
def test_a_file_of_another_kind_is_refused_with_a_sentence(
    model: Path, odd_directory: Path, name: str, kind: str
) -> None:
    file = model / name
    content = file.read_bytes() if file.is_file() else b"{}"
    file.unlink(missing_ok=True)
    if kind == "directory":
        file.mkdir()
    elif kind in ("fifo", "loop", "zero"):
        file.symlink_to(odd_directory / kind)
    elif kind == "binary":
        file.write_bytes(b"\xff\xfe\x00")
    elif kind == "cut":
        file.write_bytes(content[: len(content) // 2])
    _judge_all()


@pytest.mark.parametrize(
    "header",
    [b"", b"\0" * 8, struct.pack("<Q", 2**63), struct.pack("<Q", 2**31) + b"{}", struct.pack("<Q", 2) + b"[]",
     struct.pack("<Q", 30) + b'{"a": {"data_offsets": ["x"]}}', struct.pack("<Q", 10) + b'{"a": null',
     struct.pack("<Q", 100_000) + b"[" * 100_000],
    ids=["empty", "zero", "long", "longer", "list", "offsets", "cut", "deep"],
)  # fmt: skip
def test_weights_that_are_none_are_refused_with_a_sentence(model: Path, header: bytes) -> None:
    (model / "model.safetensors").write_bytes(header)
    _judge_all()


@pytest.mark.hypothesis  # make proof has all cases, as of a property test
def test_odd_directories_are_refused_with_a_sentence_or_planned(model: Path) -> None:
    plain = json.loads((model / "config.json").read_text(encoding="utf-8"))
    for draw in cases(120, "directory"):
        (model / "config.json").write_text(json.dumps(_mutated(draw, dict(plain))), encoding="utf-8")
        (model / "hf_quant_config.json").unlink(missing_ok=True)
        if draw.random() < 0.2:
            quantized = json.loads(json.dumps(_QUANTIZED))
            quantized["quantization"][draw.choice([*quantized["quantization"]])] = draw.choice(ODD_VALUES)
            (model / "hf_quant_config.json").write_text(json.dumps(quantized), encoding="utf-8")
        argv = draw.choice(COMMANDS + OTHERS)
        judge(argv, ask(argv))


def _mutated(draw: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    for _ in range(draw.randint(1, 3)):
        change = draw.random()
        if change < 0.6:
            config[draw.choice([*config])] = draw.choice(ODD_VALUES)
        elif change < 0.7:
            del config[draw.choice([*config])]
        else:
            name = draw.choice([*_FIELDS])
            value = json.loads(json.dumps(_FIELDS[name]))
            if isinstance(value, dict) and draw.random() < 0.6:
                value[draw.choice([*value])] = draw.choice(ODD_VALUES)
            config[name] = value if draw.random() < 0.7 else draw.choice(ODD_VALUES)
    return config
