"""Writes ``compressed_tensors.safetensors``: a linear module in each FP8 preset of compressed-tensors, and its output.

    PYTHONPATH=DIR python tests/unit/torch_engine/runner/golden/make_compressed_tensors.py

DIR has two packages that trtx does not need: ``pip install --no-deps --target DIR compressed-tensors==0.20.1 loguru``.
Of each format, by the preset's name: the tensors that compressed-tensors stores, an input ``x`` [tokens, columns], and
the output ``y`` [tokens, rows] of its own quantized module in float32. The rows are no multiple of 128; the columns
are, because compressed-tensors asks for it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import golden_file
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, QuantizationStatus, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import set_forward_quantized
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

ROWS, COLUMNS, TOKENS, BLOCK = 176, 256, 5, 128


def ranges(weight: Tensor, strategy: str) -> tuple[Tensor, Tensor]:
    """The smallest and largest values that share a scale, in the shape of the scale."""
    if strategy == "tensor":
        return weight.amin().view(1), weight.amax().view(1)
    if strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    blocks = [list(row.split(BLOCK, dim=1)) for row in weight.split(BLOCK, dim=0)]
    lowest = torch.stack([torch.stack([block.amin() for block in row]) for row in blocks])
    return lowest, torch.stack([torch.stack([block.amax() for block in row]) for row in blocks])


def golden(scheme: QuantizationScheme) -> dict[str, Tensor]:
    torch.manual_seed(5)
    module = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    x = torch.randn(TOKENS, COLUMNS) * torch.logspace(-2, 1, TOKENS)[:, None]
    assert scheme.weights is not None and scheme.input_activations is not None
    tensors = {"weight": module.weight.detach()}
    tensors["weight_scale"] = calculate_qparams(*ranges(tensors["weight"], scheme.weights.strategy), scheme.weights)[0]
    if not scheme.input_activations.dynamic:
        tensors["input_scale"] = (
            calculate_qparams(*ranges(x, "tensor"), scheme.input_activations)[0] * 0.9
        )  # clamps some
    compressor = BaseCompressor.get_value_from_registry("float-quantized")
    stored = compressor.compress(tensors, scheme)
    with torch.no_grad():
        module.weight.copy_(compressor.decompress(stored, scheme)["weight"])
        for name in ("weight_scale", "input_scale"):
            if name in stored:
                module.register_parameter(name, torch.nn.Parameter(stored[name]))
        module.quantization_scheme, module.quantization_status = scheme, QuantizationStatus.COMPRESSED
        set_forward_quantized(module)
        y = module(x[None])[0]  # a batch: a token's scale is that of the two leading dimensions
    return stored | {"x": x, "y": y}


def main() -> None:
    found = {
        f"{preset}/{name}": tensor
        for preset in ("FP8", "FP8_DYNAMIC", "FP8_BLOCK")
        for name, tensor in golden(preset_name_to_scheme(preset, ["Linear"])).items()
    }
    golden_file.write(Path(__file__).with_name("compressed_tensors.safetensors"), found)


if __name__ == "__main__":
    sys.exit(main())
