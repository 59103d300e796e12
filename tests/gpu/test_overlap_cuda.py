"""The engine with a step under way on a GPU: nothing that is launched waits, and the tokens are the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_player import Wish, assert_equal, served, workload
from runner_player import Player, random_prompt, small_runner

from trtx.torch_engine.llmapi.sampling import SamplingParams
from trtx.torch_engine.step import FROM_SLOT, Batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


new_runner = partial(small_runner, device="cuda", dtype="float32", num_blocks=11)


@pytest.mark.parametrize("graphs", [True, False])
def test_tokens_are_the_same_with_and_without_overlap(checkpoint: Path, graphs: bool) -> None:
    one = new_runner(checkpoint, cuda_graphs=graphs)
    paused = 0
    for seed in range(8):
        wishes = workload(seed)
        expected, _ = served(one, wishes, overlap=False)
        found, waited = served(one, wishes, overlap=True)
        assert_equal(found, expected, wishes)
        paused += waited
    assert paused, "nothing was preempted"
    one.close()


def test_tokens_are_the_same_with_an_fp8_cache(checkpoint: Path) -> None:
    """One after the other: an FP8 cache rounds, so that tokens depend on how prompts met in a step."""
    one = new_runner(checkpoint, kv_dtype="fp8")
    for seed in range(4):
        for wish in workload(seed):
            alone = [Wish(0, wish.prompt, wish.params, None)]
            assert_equal(served(one, alone, overlap=True)[0], served(one, alone, overlap=False)[0], alone)
    one.close()


@pytest.mark.parametrize("changes", [{}, {"cuda_graphs": False}, {"merges_passes": True, "pass_sizes": (64,)}], ids=str)
def test_nothing_that_is_launched_waits_for_the_device(checkpoint: Path, changes: dict[str, Any]) -> None:
    """torch raises at what would: in steps of decodes of every kind, whose tokens only the device knows, and chunks."""
    one = new_runner(checkpoint, num_blocks=64, **changes)
    player = Player(one)
    kinds = [
        {"temperature": 1.0, "logprobs": 2},
        {"temperature": 0.7, "top_p": 0.8, "frequency_penalty": 0.5},
        {"temperature": 1.0, "min_tokens": 3, "presence_penalty": 0.1},
    ]
    decoding = [
        player.add(random_prompt(9, at), sampling=SamplingParams(**kind), stop_ids=(3, 4))
        for at, kind in enumerate(kinds)
    ]
    player.finish(decoding, 2)
    arriving = [
        player.add(random_prompt(20, 7), sampling=SamplingParams(prompt_logprobs=1, repetition_penalty=1.2)),
        player.add(random_prompt(17, 8), sampling=SamplingParams(temperature=0.3)),
    ]
    shares = [sequence.share(64) for sequence in (*decoding, *arriving)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = one.launch(Batch(shares))
        later = [sequence.share(1) for sequence in decoding]
        for share in later:
            share.new_token_ids, share.start = [FROM_SLOT], share.start + 1
            share.banned_ids = ()
        second = one.launch(Batch(later))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    results = first.results(), second.results()
    assert all(sampled.error is None for part in results for sampled in part)
    for sequence, share, sampled in zip((*decoding, *arriving), shares, results[0], strict=True):
        sequence.take(share, sampled)
    again = one.launch(Batch([sequence.share(1) for sequence in decoding])).results()
    assert again[0].token_id == results[1][0].token_id
    one.close()
