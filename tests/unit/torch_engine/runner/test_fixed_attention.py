"""Attention on a CPU that no bit of depends on what else is computed, and how a sequence was cut into passes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from trtx.torch_engine.runner.fixed_attention import attend_fixed, exp2
from trtx.torch_engine.runner.kernels import FIXED_CHUNK

LENGTH = FIXED_CHUNK + 90


def case(dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [tokens, heads, dim], keys and values [kv_heads, tokens, dim] of a sequence."""
    torch.manual_seed(dim)
    q = torch.randn(LENGTH, 4, dim)
    keys, values = torch.randn(2, 2, LENGTH, dim)
    return q.to(dtype), keys.to(dtype), values.to(dtype)


@pytest.mark.parametrize(("dim", "dtype"), [(16, torch.float32), (24, torch.float32), (16, torch.bfloat16)])
def test_it_is_causal_attention(dim: int, dtype: torch.dtype) -> None:
    q, keys, values = case(dim, dtype)
    rows = torch.tensor([0, 1, FIXED_CHUNK - 1, FIXED_CHUNK, LENGTH - 1])
    out = attend_fixed(q[rows], keys, values, rows)
    seen = torch.arange(LENGTH) <= rows[:, None]
    expected = F.scaled_dot_product_attention(
        q[rows].transpose(0, 1)[None].float(), keys[None].float(), values[None].float(),
        attn_mask=seen, enable_gqa=True,
    )[0].transpose(0, 1)  # fmt: skip
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [1, 100, FIXED_CHUNK + 9])
def test_through_a_window_it_is_attention_to_the_latest_tokens_and_the_same_bits_alone(window: int) -> None:
    q, keys, values = case(16, torch.float32)
    rows = torch.tensor([0, 1, 99, 100, FIXED_CHUNK - 1, FIXED_CHUNK, LENGTH - 1])
    out = attend_fixed(q[rows], keys, values, rows, window=window)
    tokens = torch.arange(LENGTH)
    expected = F.scaled_dot_product_attention(
        q[rows].transpose(0, 1)[None], keys[None], values[None],
        attn_mask=(tokens <= rows[:, None]) & (tokens > rows[:, None] - window), enable_gqa=True,
    )[0].transpose(0, 1)  # fmt: skip
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)
    for index, row in enumerate(rows.tolist()):
        first = max(0, row - window + 1) // 8 * 8
        kept = keys[:, first:].clone(), values[:, first:].clone()
        for each in kept:
            each[:, row + 1 - first :] = torch.nan
        alone = attend_fixed(q[rows[index, None]], *kept, rows[index, None], window=window, first=first)
        assert torch.equal(alone[0], out[index]), row


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_is_the_same_bits_alone_among_others_and_with_whatever_lies_behind_it(threads: int) -> None:
    q, keys, values = case(24, torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        positions = torch.arange(FIXED_CHUNK - 40, LENGTH)
        together = attend_fixed(q[positions], keys, values, positions)
        part = attend_fixed(q[positions[7:20]], keys, values, positions[7:20])
        assert torch.equal(part, together[7:20])
        for index in (0, 39, 40, 41, len(positions) - 1):
            position = positions[index : index + 1]
            alone = attend_fixed(q[position], keys, values, position)
            assert torch.equal(alone[0], together[index])
            poisoned = keys.clone(), values.clone()
            for each in poisoned:
                each[:, int(position) + 1 :] = torch.nan
            assert torch.equal(attend_fixed(q[position], *poisoned, position)[0], together[index])
    finally:
        torch.set_num_threads(before)


def test_its_exponential_is_right_to_a_few_units_and_zero_far_below() -> None:
    x = -torch.rand(10_001) * 140
    x[:3] = torch.tensor([0.0, -1.0, -torch.inf])
    expected = torch.exp2(x.double())
    actual = exp2(x).double()
    assert actual[:3].tolist() == [1.0, 0.5, 0.0]
    normal = x >= -126
    assert ((actual - expected).abs() <= 5e-7 * expected)[normal].all()
    assert not actual[~normal].any()
