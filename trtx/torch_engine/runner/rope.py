"""Rotary angles in float32, with transformers' order of operations, so that both round alike."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trtx.checkpoint.model_config import ModelConfig
from trtx.checkpoint.rope import RopeConfig, Yarn


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position for each of the ``head_dim // 2`` pairs, float32.

    ``llama3`` uses the bands of Llama 3.1's published configuration: wavelengths beyond the original context are
    stretched by ``factor``, short ones are kept, those between are interpolated. ``yarn`` uses the bands of the YaRN
    paper (https://huggingface.co/papers/2309.00071).
    """
    wavelengths = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)  # divided by 2 pi
    frequencies = 1.0 / wavelengths
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.yarn is not None:
        kept = 1 - _ramp(rope, rope.yarn, head_dim)
        return 1.0 / (rope.factor * wavelengths) * (1 - kept) + frequencies * kept
    return frequencies


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    smooth = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(between, (1 - smooth) * stretched / rope.factor + smooth * stretched, stretched)


def _ramp(rope: RopeConfig, yarn: Yarn, head_dim: int) -> Tensor:
    """Fraction by which each pair is stretched: from 0 for pairs that rotate fast to 1 for pairs that rotate slowly."""

    def pair_that_turns(rotations: float) -> float:
        turns = math.log(rope.original_max_position / (rotations * 2 * math.pi))
        return head_dim * turns / (2 * math.log(rope.theta))

    first, last = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    return ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)


def rotary_table(rope: RopeConfig, head_dim: int, max_seq_len: int, device: torch.device) -> Tensor:
    """``[max_seq_len, head_dim]`` float32: a position's cosines, then its sines, with YaRN's attention factor."""
    angles = torch.outer(torch.arange(max_seq_len).float(), inverse_frequencies(rope, head_dim))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return (table if rope.yarn is None else table * rope.yarn.attention_factor).to(device)


def layer_tables(config: ModelConfig, rotary: Tensor, local: Tensor | None) -> tuple[Tensor, ...]:
    """Returns the rotary table of each layer. ``local``: of Gemma 3's local layers."""
    if config.gemma3 is None or local is None:
        return (rotary,) * config.num_layers
    return tuple(local if is_local else rotary for is_local in config.gemma3.is_local)
