"""Rotary angles, in float32 and in the order of operations of transformers, so that both round alike."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trtx.checkpoint.rope import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each of the ``head_dim // 2`` pairs, float32.

    The bands of ``llama3`` are those of Llama 3.1's published configuration: wavelengths beyond the original
    context are stretched by ``factor``, short ones kept, those between interpolated.
    """
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        longest = rope.original_max_position / rope.low_freq_factor
        shortest = rope.original_max_position / rope.high_freq_factor
        stretched = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
        smooth = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        between = (wavelengths >= shortest) & (wavelengths <= longest)
        return torch.where(between, (1 - smooth) * stretched / rope.factor + smooth * stretched, stretched)
    return frequencies


def rotary_table(rope: RopeConfig, head_dim: int, max_seq_len: int, device: torch.device) -> Tensor:
    """``[max_seq_len, head_dim]`` float32: the cosines of a position, then its sines."""
    angles = torch.outer(torch.arange(max_seq_len).float(), inverse_frequencies(rope, head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
