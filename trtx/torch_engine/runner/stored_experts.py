"""Splits tensors that hold all experts of a layer into one tensor for each expert, in any form in which checkpoints
store them.

Three forms are known. transformers can save a Qwen3-MoE as stacks ``[experts, rows, columns]``. transformers saves a
gpt-oss transposed, with alternating columns of gate and up. OpenAI published it in MXFP4, with alternating rows of gate
and up, in ``*_blocks`` and ``*_scales``, which may be in different files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from trtx.checkpoint.experts import ExpertConfig, StackName, parse_stack
from trtx.checkpoint.formats import MX_BLOCK
from trtx.checkpoint.model_config import ModelConfig
from trtx.errors import UsageError
from trtx.torch_engine.runner.formats import dequantize_mxfp4

NamedReads = Iterator[tuple[str, Callable[[], Tensor]]]
"""The name of each tensor, and a function that reads it."""


def single_experts(tensors: NamedReads, config: ModelConfig, model_dir: Path, device: torch.device) -> NamedReads:
    """Yields the tensors of single experts, and every other tensor unchanged. ``device``: where MXFP4 is dequantized to
    float32, one expert at a time.

    Raises UsageError for a misshapen tensor, and for blocks without scales.
    """
    experts, halves = config.experts, dict[str, dict[str, Tensor]]()
    for name, read in tensors:
        stack = None if experts is None else parse_stack(name)
        if experts is None or stack is None or not _is_expected(stack, experts):
            yield name, read
            continue
        value, expected = read(), _stored_shape(stack, experts, config.hidden_size)
        if value.shape != expected:
            raise UsageError(
                f"{model_dir}: tensor {name} has shape {list(value.shape)}, and config.json wants {list(expected)}; "
                "use a checkpoint whose files belong together"
            )
        if stack.content not in ("blocks", "scales"):
            yield from _parts(stack, experts, lambda expert, value=value: value[expert])  # type: ignore[misc]
            continue
        _check_bytes(value, name, model_dir)
        both = halves.setdefault(f"{stack.at}.{stack.kind}_proj", {})
        both[stack.content] = value
        if len(both) == 2:
            del halves[f"{stack.at}.{stack.kind}_proj"]
            yield from _parts(stack, experts, _dequantized(both["blocks"], both["scales"], device))
    for name, both in halves.items():
        lacking = "scales" if "blocks" in both else "blocks"
        raise UsageError(f"{model_dir} lacks the tensor {name}_{lacking}; download the checkpoint whole")


def _is_expected(stack: StackName, experts: ExpertConfig) -> bool:
    if stack.content == "weight":
        return not experts.is_mxfp4
    return experts.has_bias if stack.content == "bias" else experts.is_mxfp4


def _stored_shape(stack: StackName, experts: ExpertConfig, hidden: int) -> tuple[int, ...]:
    rows, columns = experts.stack_shape(hidden, stack.kind)[1:]
    if stack.content == "bias":
        return experts.count, rows
    if stack.content == "weight":
        return (experts.count, columns, rows) if experts.is_interleaved else (experts.count, rows, columns)
    blocks = (experts.count, rows, columns // MX_BLOCK)
    return (*blocks, MX_BLOCK // 2) if stack.content == "blocks" else blocks


def _parts(stack: StackName, experts: ExpertConfig, of_expert: Callable[[int], Tensor]) -> NamedReads:
    """Yields the tensors of each expert. ``of_expert``: reads one expert's part of the stack."""
    is_transposed = experts.is_interleaved and stack.content == "weight"
    for expert in range(experts.count):
        value = of_expert(expert)
        value = value.T if is_transposed else value
        for place, part in enumerate(("gate", "up") if stack.kind == "gate_up" else ("down",)):
            rows = experts.rows(part)
            if experts.is_interleaved and stack.kind == "gate_up":
                rows = slice(place, None, 2)
            yield stack.of_expert(expert, part), lambda value=value, rows=rows: value[rows]  # type: ignore[misc]


def _dequantized(blocks: Tensor, scales: Tensor, device: torch.device) -> Callable[[int], Tensor]:
    return lambda expert: dequantize_mxfp4(blocks[expert].to(device), scales[expert].to(device))


def _check_bytes(value: Tensor, name: str, model_dir: Path) -> None:
    if value.dtype != torch.uint8:
        found = str(value.dtype).removeprefix("torch.")
        raise UsageError(f"{model_dir}: tensor {name} is {found}, its quantization_config says uint8")
