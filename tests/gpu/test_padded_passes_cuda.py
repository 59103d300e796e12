"""CUDA graphs of passes with prompt chunks: the tokens of passes without."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_player import assert_equal, served, workload
from runner_player import FAMILIES, Player, build, random_prompt, save, small_runner

from trtx.torch_engine.llmapi.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
SIZES = (3, 16, 40)
ALTERNATING = {
    "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 13,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip


new_runner = partial(small_runner, device="cuda", dtype="float32", merges_passes=True, pass_sizes=SIZES)


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_an_engines_tokens_in_float32_are_the_cpus(checkpoint: Path, graphs: bool, merges: bool) -> None:
    on_cpu = new_runner(checkpoint, device="cpu", merges_passes=False, pass_sizes=())
    one = new_runner(checkpoint, cuda_graphs=graphs, merges_passes=merges)
    for seed in range(4):
        wishes = workload(seed)
        expected, _ = served(on_cpu, wishes, overlap=False)
        for overlap in (False, True):
            assert_equal(served(one, wishes, overlap=overlap)[0], expected, wishes)
    one.close()


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize(("family", "changes"), [*((family, {}) for family in FAMILIES), ("qwen2", ALTERNATING)])
def test_a_graph_gives_the_bits_of_the_same_padded_pass_without(
    family: str, changes: dict[str, Any], kv_dtype: str, tmp_path: Path
) -> None:
    model_dir, found = save(build(family, num_attention_heads=8, head_dim=32, **changes), tmp_path), []
    for graphs in (True, False):
        one = new_runner(model_dir, dtype="bfloat16", kv_dtype=kv_dtype, cuda_graphs=graphs, num_blocks=256)
        player, wish = Player(one), SamplingParams(logprobs=4)
        playing = [player.add(random_prompt(length, length), sampling=wish) for length in (5, 3, 6)]
        long = player.add(random_prompt(150, 1))
        while long.computed < len(long.prompt):  # no step of decodes alone, which graphs pad and passes without do not
            player.step([*playing, long], chunk=13)
        found.append([(result.token_id, result.logprobs) for each in playing for result in each.results])
        one.close()
    assert found[0] == found[1]
