"""Writes ``modelopt.safetensors``: one linear module in each format as ModelOpt exports it, and what ModelOpt computes.

    python tests/unit/torch_engine/runner/golden/make_modelopt.py

Of each format: the module's exported tensors, an input ``x`` [tokens, columns], the output ``y`` [tokens, rows] of
ModelOpt's own fake-quantized module in float32 before the export. Made with ModelOpt 0.47.0 on a CPU (half a minute).
"""

from __future__ import annotations

import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

import golden_file
import modelopt.torch.quantization as mtq
import modelopt.torch.quantization.tensor_quant as tensor_quant
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

CONFIGS: dict[str, Any] = {
    "FP8": mtq.FP8_DEFAULT_CFG,
    "W4A16_AWQ": mtq.INT4_AWQ_CFG,
    "NVFP4": mtq.NVFP4_DEFAULT_CFG,
    "W8A8_SQ_PER_CHANNEL": mtq.INT8_SMOOTHQUANT_CFG,
    "FP8_PER_CHANNEL_PER_TOKEN": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
    "FP8_PB_WO": mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG,
}
MODULE = "model.layers.0.self_attn.o_proj"  # its input is no other module's, so the export changes nothing about it
OTHERS = ("q", "k", "v", "gate", "up", "down")


def model() -> Qwen3ForCausalLM:
    torch.manual_seed(3)
    shape = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, initializer_range=0.3, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    return Qwen3ForCausalLM(shape).float().eval()


def nvfp4_blocks(inputs: torch.Tensor, block_size: int, amax: torch.Tensor, *_: int) -> torch.Tensor:
    """ModelOpt's dynamic block quantization is a CUDA kernel; its own packing and unpacking do the same on a CPU."""
    packed, scale, double = NVFP4QTensor.quantize(inputs.clone(), block_size, None, amax.float() / (6 * 448))
    return packed.dequantize(torch.float32, scale=scale, double_scale=double, block_sizes={-1: block_size})


def golden(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    calibration = [torch.randint(64, (1, 16)) for _ in range(4)]

    def run(quantized: torch.nn.Module) -> None:
        for ids in calibration:
            quantized(ids)

    alone = copy.deepcopy(config)
    alone["quant_cfg"] += [{"quantizer_name": f"*.{name}_proj.*", "enable": False} for name in OTHERS]
    quantized = mtq.quantize(model(), alone, run)
    seen: dict[str, torch.Tensor] = {}

    def look(_: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        seen["x"], seen["y"] = inputs[0][0].clone(), output[0].clone()

    hook = quantized.get_submodule(MODULE).register_forward_hook(look)
    with torch.no_grad():
        quantized(calibration[0][:, :6])
    hook.remove()
    with tempfile.TemporaryDirectory() as directory:
        export_hf_checkpoint(quantized, export_dir=directory)
        stored = load_file(Path(directory) / "model.safetensors")
    prefix = f"{MODULE}."
    return seen | {name.removeprefix(prefix): value for name, value in stored.items() if name.startswith(prefix)}


def main() -> None:
    tensor_quant.dynamic_block_quantize_op = nvfp4_blocks
    found = {
        f"{algorithm}/{name}": tensor
        for algorithm, config in CONFIGS.items()
        for name, tensor in golden(config).items()
    }
    golden_file.write(Path(__file__).with_name("modelopt.safetensors"), found)


if __name__ == "__main__":
    sys.exit(main())
