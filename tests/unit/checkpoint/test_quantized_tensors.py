"""Tensors that do not fit a quantized checkpoint's config are named before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trtx.checkpoint.dense import checkpoint_tensors
from trtx.checkpoint.model_config import read_model_config
from trtx.checkpoint.quantized_tensors import check_quantized_tensors
from trtx.checkpoint.shapes import SHAPES
from trtx.errors import UsageError

Tensors = dict[str, Tensor]
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
DOWN, UP = "model.layers.1.mlp.down_proj", "model.layers.1.mlp.up_proj"
SCALE = f"{DOWN}.weight_scale_inv"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Block scales in bfloat16, as Qwen stores them, in two files."""
    stated = {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp"], **BLOCKS}
    config: dict[str, Any] = SHAPES["tiny"].config | {"num_hidden_layers": 2, "quantization_config": stated}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {
        name: torch.ones(tensor.shape).to(torch.float8_e4m3fn if tensor.dtype == "float8_e4m3fn" else torch.bfloat16)
        for name, tensor in checkpoint_tensors(read_model_config(tmp_path)).items()
    }
    scales = {name: value for name, value in tensors.items() if "scale" in name}
    save_file({name: value for name, value in tensors.items() if name not in scales}, tmp_path / "a.safetensors")
    save_file(scales, tmp_path / "b.safetensors")
    write_index(tmp_path)
    return tmp_path


def write_index(directory: Path) -> None:
    named = {name: file.name for file in sorted(directory.glob("?.safetensors")) for name in load_file(file)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))


def check(directory: Path) -> None:
    check_quantized_tensors(directory, read_model_config(directory))


def put(name: str, value: Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: value})


def scales(value: float, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    found = torch.ones(2, 6, dtype=dtype)
    found[1, 4] = value
    return found


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("b", put(SCALE, torch.ones(2, 5)), rf"tensor {SCALE} has shape [2, 5], SOURCE says [2, 6]"),
        ("b", put(SCALE, torch.ones(6, 2)), rf"tensor {SCALE} has shape [6, 2], SOURCE says [2, 6]"),
        ("b", put(SCALE, torch.ones(())), rf"tensor {SCALE} has shape [], SOURCE says [2, 6]"),
        (
            "b", put(SCALE, torch.ones(2, 6, dtype=torch.uint8)),
            f"tensor {SCALE} is uint8, SOURCE says a float of 16 or 32 bits",
        ),
        (
            "b", put(SCALE, torch.ones(2, 6).to(torch.float8_e8m0fnu)),
            f"tensor {SCALE} is float8_e8m0fnu, SOURCE says a float of 16 or 32 bits",
        ),
        *(
            ("b", put(SCALE, scales(bad, dtype)), f"tensor {SCALE} holds a scale that is negative, infinite or NaN")
            for bad in (-1e-3, float("nan"), float("inf"), -float("inf"))
            for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
        ),
        (
            "b", lambda tensors: tensors.pop(SCALE),
            f"holds {DOWN}.weight in float8_e4m3fn, and no file holds {SCALE}, which SOURCE asks for",
        ),
        (
            "a", put(f"{DOWN}.weight", torch.ones(256, 768, dtype=torch.bfloat16)),
            f"tensor {DOWN}.weight is bfloat16, SOURCE says float8_e4m3fn",
        ),
        (
            "a", put(f"{DOWN}.weight", torch.ones(256, 640).to(torch.float8_e4m3fn)),
            f"tensor {DOWN}.weight has shape [256, 640], SOURCE says [256, 768]",
        ),
        (
            "a", put("model.layers.0.mlp.up_proj.weight", torch.ones(768, 256).to(torch.float8_e4m3fn)),
            "tensor model.layers.0.mlp.up_proj.weight is float8_e4m3fn, SOURCE says a float of 16 or 32 bits",
        ),
        (
            "b", put(f"{UP}.weight_zero_point", torch.ones(6, 2)),
            f"holds the tensor {UP}.weight_zero_point, for which SOURCE has no place",
        ),
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_is_named_with_its_file(
    checkpoint: Path, file: str, change: Callable[[Tensors], Any], says: str
) -> None:
    check(checkpoint)
    path = checkpoint / f"{file}.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    write_index(checkpoint)
    with pytest.raises(UsageError) as refused:
        check(checkpoint)
    said = str(refused.value)
    named = checkpoint / ("a.safetensors" if says.startswith("holds model") else path.name)
    said = said.replace(f"quantization_config in {checkpoint / 'config.json'}", "SOURCE")
    assert said.startswith(str(named)) and says in said and "\n" not in said


@pytest.mark.parametrize("value", [0.0, 1e-30, 3e38])
def test_scales_of_any_size_are_scales(checkpoint: Path, value: float) -> None:
    """Zero belongs to a block of zeros."""
    tensors = load_file(checkpoint / "b.safetensors")
    tensors[SCALE] = scales(value)
    save_file(tensors, checkpoint / "b.safetensors")
    check(checkpoint)


def test_a_checkpoint_whose_weights_are_elsewhere_or_not_quantized_is_not_looked_at(checkpoint: Path) -> None:
    (checkpoint / "b.safetensors").unlink()
    check(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    del config["quantization_config"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    check(checkpoint)
