"""Guided decoding on a GPU: the mask kernel against its definition, and an engine's tokens against a CPU's.

Without a GPU: TRITON_INTERPRET=1 and the package triton, for the kernel only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_player import assert_equal
from guided_player import guided_workload, served_guided
from kernel_cases import DEVICE, IS_INTERPRETED

from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner
from trtx.torch_engine.runner.sampling import definition
from trtx.torch_engine.runner.sampling.definition import NO_TOKEN
from trtx.torch_engine.runner.sampling.masks import TokenMasks
from trtx.torch_engine.runner.sampling.rows import SamplingRow
from trtx.torch_engine.runner.sampling.slots import new_edits
from trtx.torch_engine.sampling_plan import SamplingPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or IS_INTERPRETED), reason="needs CUDA or TRITON_INTERPRET=1"),
]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
VOCABS = [211, 4096] if IS_INTERPRETED else [211, 4096, 151_936]
PLANS = [
    SamplingPlan(),
    SamplingPlan(is_greedy=False),
    SamplingPlan(is_greedy=False, top_k=3, top_p=0.9),
    SamplingPlan(is_greedy=False, repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingPlan(repetition_penalty=1.3, presence_penalty=0.4),
    SamplingPlan(is_greedy=False, min_p=0.2),
]
SLOTS, PROMPT = 12, 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_the_mask_kernel_excludes_what_its_definition_excludes(vocab: int, dtype: torch.dtype) -> None:
    """Every second slot is limited: to few tokens, to half of them, to one, or to none."""
    from trtx.torch_engine.runner.sampling.triton_sampling import TritonSampling

    torch.manual_seed(vocab)
    plans = [PLANS[slot % len(PLANS)] for slot in range(SLOTS)]
    rows = [SamplingRow.of(plan, 1000 + slot, PROMPT, vocab) for slot, plan in enumerate(plans)]
    edits = [torch.randint(0, 3, (vocab,), dtype=torch.int32) if plan.has_penalties else None for plan in plans]
    order = [7, 0, 3, 10, 1, 2, 11, 5, 4, 9]  # the batch's rows: not all slots, and in another order
    limited = [9, 3, 1, 11, 5, 7]
    masks = TokenMasks(SLOTS, vocab, DEVICE)
    allowed = torch.zeros(len(limited), vocab, dtype=torch.bool)
    for at, share in enumerate((0.5, 0.01, 0.9, 0.0, 0.5, 0.02)):
        allowed[at] = torch.rand(vocab) < share
        if share:
            allowed[at, vocab - 1 - at] = True
    padded = torch.nn.functional.pad(allowed, (0, -vocab % 32))
    bits = (padded.view(len(limited), -1, 32).long() << torch.arange(32)).sum(dim=-1)
    masks.values[: len(limited)] = torch.where(bits >= 2**31, bits - 2**32, bits).int().numpy()
    masks.limit(limited)

    logits = (torch.randn(len(order), vocab) * 3).to(dtype)
    expected = logits.clone()
    for row, slot in enumerate(order):
        if slot in limited:
            expected[row].masked_fill_(~allowed[limited.index(slot)], -torch.inf)
    wanted = definition.sample(
        expected.float().clone(), [rows[slot] for slot in order],
        [None if (edit := edits[slot]) is None else edit.clone() for slot in order],
        [rows[slot].index(PROMPT - 1 + slot) for slot in order],
    )  # fmt: skip

    on_device = [None if edit is None else new_edits(vocab, DEVICE).copy_(edit) for edit in edits]
    fields = [row.fields(0 if edit is None else edit.data_ptr()) for row, edit in zip(rows, on_device, strict=True)]
    last_tokens = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
    kernels = TritonSampling(torch.tensor(fields, dtype=torch.int64, device=DEVICE), last_tokens, vocab, masks)
    found, tokens = logits.to(DEVICE), torch.full((len(order),), -7, dtype=torch.int64, device=DEVICE)
    slots, positions = (
        torch.tensor(values, dtype=torch.int32, device=DEVICE)
        for values in (order, [PROMPT - 1 + slot for slot in order])
    )
    kernels.sample(tokens, found, slots, positions)
    assert torch.equal(found.cpu(), expected)
    assert tokens.tolist() == wanted.tolist()
    assert tokens.tolist()[order.index(11)] == NO_TOKEN, "the row without an allowed token"

    masks.limit([])
    found = logits.to(DEVICE)
    kernels.sample(tokens, found, slots, positions)
    assert torch.equal(found.cpu(), logits), "no slot is limited any more"


def new_runner(checkpoint: Path, device: str, **changes: Any) -> TorchRunner:
    values: dict[str, Any] = {
        "device": device, "dtype": "float32", "tokens_per_block": 8, "num_blocks": 64, "max_batch_size": 5,
        "guided": True,
    } | changes  # fmt: skip
    return create_runner(RunnerArgs(model_dir=checkpoint, **values))


@needs_cuda
@pytest.mark.parametrize("graphs", [True, False])
def test_an_engine_gives_the_guided_tokens_of_a_cpu(checkpoint: Path, graphs: bool) -> None:
    cpu, cuda = new_runner(checkpoint, "cpu"), new_runner(checkpoint, "cuda", cuda_graphs=graphs)
    for seed in range(6):
        wishes = guided_workload(seed)
        expected = served_guided(cpu, wishes, overlap=False)
        for overlap in (True, False):
            assert_equal(served_guided(cuda, wishes, overlap=overlap), expected, wishes)
    cuda.close()


@needs_cuda
def test_preempted_guided_sequences_have_the_same_tokens(checkpoint: Path) -> None:
    small, large = (new_runner(checkpoint, "cuda", num_blocks=blocks) for blocks in (11, 64))
    for seed in range(6):
        wishes = guided_workload(seed)
        assert_equal(served_guided(small, wishes, overlap=True), served_guided(large, wishes, overlap=True), wishes)
    for runner in (small, large):
        runner.close()


@needs_cuda
def test_unguided_requests_are_bit_for_bit_the_same_beside_guided_ones(checkpoint: Path) -> None:
    one = new_runner(checkpoint, "cuda", deterministic=True)
    wishes = guided_workload(5, share=0.6)
    for wish in wishes:
        wish.params["logprobs"] = 2
    beside = served_guided(one, wishes, overlap=True)
    others = [at for at, wish in enumerate(wishes) if wish.params["guided_decoding"] is None]
    assert 0 < len(others) < len(wishes)
    free = [wishes[at] for at in others]
    alone = served_guided(one, free, overlap=True)
    for place, at in enumerate(others):
        assert (alone[place].tokens, alone[place].logprobs) == (beside[at].tokens, beside[at].logprobs)
    one.close()
