"""Attention of passes that are padded to a size. Without a GPU: TRITON_INTERPRET=1 and the package triton."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import DEVICE, DTYPES, IS_INTERPRETED, close, config, random
from runner_player import Playing
from test_ragged_attention import Case

from trtx.torch_engine.runner.packed_pass import PackedPass
from trtx.torch_engine.runner.padded_passes import PassSize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or IS_INTERPRETED), reason="needs CUDA or TRITON_INTERPRET=1"),
]
DECODES = [(70, 1), (200, 1), (8, 1)]
CHUNKS = [(0, 17), (64, 20), (1, 1)]
LONG_AND_SHORT = [(2100, 17), (2040, 8), (2040, 20), (0, 5)]  # up to 2,048 tokens are one list's, more another's


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("decodes", "chunks"), [(DECODES, CHUNKS), ([], CHUNKS), (DECODES, CHUNKS[2:]), (DECODES, LONG_AND_SHORT)]
)
@pytest.mark.parametrize("processors", [1, 132])  # nothing cut, everything cut
def test_a_padded_pass_equals_torch_and_padding_gets_nothing(
    decodes: list[tuple[int, int]], chunks: list[tuple[int, int]], dtype: torch.dtype, processors: int
) -> None:
    from trtx.torch_engine.runner.ragged_attention import RaggedAttention

    case = Case([*decodes, *chunks], heads=(8, 2, 16), dtype=dtype)
    shares = [Playing(slot, [0] * (context + new), [], computed=context).share(new)
              for slot, (context, new) in enumerate(case.spans)]  # fmt: skip
    packed = PackedPass(shares, len(decodes))
    size, real = PassSize.of(64, 9), len(packed.tokens)
    memory = np.zeros(size.num_inputs, np.int32)
    size.fill(memory, packed, case.cache.padding_slot)
    inputs = size.inputs(torch.from_numpy(memory).to(DEVICE))
    q = random(64, *case.heads[::2], dtype=dtype)
    heads, kv_heads, dim = case.heads
    attention = RaggedAttention(
        config(heads=heads, kv_heads=kv_heads, head_dim=dim), case.cache, processors, fixed=False
    )
    out = torch.full((64, heads, dim), 7.0, dtype=dtype, device=DEVICE)
    attention.attend(q, 1, attention.planned(inputs, dtype).work, out, None, overlaps=False)
    close(out[:real].flatten(1), case.expected(q[:real], case.inputs))
    assert (out[real:] == 7.0).all()
