"""Ranks over gloo on a CPU sleep, wake and get new weights together: all of them, or none."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engine_player import accepted, assert_equal, served, workload
from replaced_weights import logprobs, pair_of
from runner_player import Player, build, random_prompt, save
from safetensors.torch import load_file, save_file

from trtx.checkpoint import resolve_checkpoint
from trtx.checkpoint.model_config import read_model_config
from trtx.checkpoint.tensor_parallel import RankSizes
from trtx.errors import UsageError
from trtx.torch_engine.core.speculation.create import create_speculation
from trtx.torch_engine.llm_args import SpeculativeConfig
from trtx.torch_engine.messages import MEMORY_TAGS
from trtx.torch_engine.ranks.children import start_ranks
from trtx.torch_engine.ranks.leader import LeadingRunner, create_ranked_runner
from trtx.torch_engine.runner import DraftArgs, RunnerArgs
from trtx.torch_engine.runner.draft_target import SmallModel
from trtx.torch_engine.runner.rank_split import RankSplit
from trtx.torch_engine.runner.weight_tensors import named_weights
from trtx.torch_engine.runner.weights import load_weights

pytestmark = pytest.mark.slow


def unexpected(error: Exception) -> None:
    print(error)  # the test then fails at its time limit, with this in its output


@contextmanager
def two_ranks(model_dir: Path, **changes: Any) -> Iterator[LeadingRunner]:
    values: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "tokens_per_block": 8, "num_blocks": 40, "max_batch_size": 4,
        "cpu_threads": 1, "sleeps": True,
    }  # fmt: skip
    ranked = create_ranked_runner(RunnerArgs(model_dir=model_dir, **values | changes), start_ranks(2, unexpected))
    try:
        yield ranked
    finally:
        ranked.close()


def of_new_ranks(model_dir: Path, **changes: Any) -> list[list[Any]]:
    with two_ranks(model_dir, **changes) as ranked:
        return logprobs(ranked)


def head_of(ranked: LeadingRunner) -> torch.Tensor:
    """Of rank 0's weights."""
    return ranked._own._decoder._weights.head


def fill_pool(ranked: LeadingRunner) -> None:
    player = Player(ranked)
    player.finish([player.add(random_prompt(480, seed), room=8) for seed in range(4)], 1)


def used_bytes(ranked: LeadingRunner) -> int:
    """Memory of rank 1's process."""
    (rank,) = ranked.ranks
    return int(psutil.Process(rank.pid).memory_info().rss)


@contextmanager
def without_files(ranked: LeadingRunner) -> Iterator[None]:
    """Rank 1 can open no file in the meantime."""
    (rank,) = ranked.ranks
    before = resource.prlimit(rank.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(rank.pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.prlimit(rank.pid, resource.RLIMIT_NOFILE, before)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one config with different weights."""
    return pair_of("qwen3", tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("keeps_weights", [True, False])
def test_every_rank_gives_its_memory_back_and_answers_as_before(keeps_weights: bool, tmp_path: Path) -> None:
    directory = save(build("qwen3", head_dim=128, intermediate_size=8192), tmp_path)
    with two_ranks(directory, keeps_weights=keeps_weights, num_blocks=256) as ranked:
        expected, address = logprobs(ranked), ranked.pool.data_ptr()
        for tags in (MEMORY_TAGS, ["model_weights"], ["kv_cache"]):
            fill_pool(ranked)
            before = used_bytes(ranked)
            ranked.release(tags)
            assert bool(head_of(ranked).any()) == ("model_weights" not in tags)
            # 5.9 MB of KV are in rank 1's half of the pool, and its half of the MLPs has 9.4 MB.
            if tags == ["kv_cache"]:
                assert used_bytes(ranked) < before - (5 << 20)
            elif not keeps_weights:
                assert used_bytes(ranked) < before - (8 << 20)
            ranked.restore(tags)
            assert logprobs(ranked) == expected
        assert ranked.pool.data_ptr() == address


@pytest.mark.parametrize(
    ("family", "expert_ranks"), [("llama", 1), pytest.param("gpt_oss", 2, marks=pytest.mark.proof), ("qwen3_moe", 2)]
)
def test_every_rank_gets_its_own_share_of_new_weights(family: str, expert_ranks: int, tmp_path: Path) -> None:
    """llama's head is a part of its embedding; gpt_oss has biases that one rank alone adds."""
    first, second = pair_of(family, tmp_path)
    expected = of_new_ranks(second, moe_expert_parallel_size=expert_ranks)
    with two_ranks(first, moe_expert_parallel_size=expert_ranks) as ranked:
        before = logprobs(ranked)
        assert before != expected
        ranked.update_weights(second)
        assert logprobs(ranked) == expected
        ranked.release(MEMORY_TAGS)
        ranked.update_weights(first)
        ranked.restore(MEMORY_TAGS)
        assert logprobs(ranked) == before


def test_a_draft_model_of_rank_0_sleeps_with_all_ranks() -> None:
    draft = DraftArgs("Draft_Target", "synthetic:tiny-draft")
    config = SpeculativeConfig(decoding_type="Draft_Target", max_draft_len=3, draft_len_schedule={5: 3})
    directory = resolve_checkpoint("synthetic:tiny-trained").path
    with two_ranks(directory, num_blocks=64, max_batch_size=5, max_draft_len=3, draft=draft) as ranked:
        wishes, answers = workload(0, count=4), []
        for _ in range(2):
            speculation = create_speculation(config, ranked, max_num_tokens=64)
            answers.append(served(ranked, wishes, overlap=True, speculation=speculation)[0])
            assert accepted(speculation)
            ranked.release(MEMORY_TAGS)
            assert isinstance(ranked.draft_model, SmallModel)
            assert not ranked.draft_model._runner.pool.any()
            ranked.restore(MEMORY_TAGS)
        assert_equal(answers[1], answers[0], wishes)


@pytest.fixture(scope="module")
def ranked(checkpoints: tuple[Path, Path]) -> Iterator[LeadingRunner]:
    """Two ranks that read their weights anew after a sleep.

    A process has one group of ranks at a time, so the tests with other ranks are above.
    """
    with two_ranks(checkpoints[0], keeps_weights=False) as found:
        yield found


@pytest.fixture(scope="module")
def expected(ranked: LeadingRunner) -> list[list[Any]]:
    return logprobs(ranked)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_share_of_no_numbers_leaves_every_rank_its_old_weights(
    ranked: LeadingRunner, expected: list[list[Any]], checkpoints: tuple[Path, Path], rank: int, tmp_path: Path
) -> None:
    stored = Path(shutil.copytree(checkpoints[1], tmp_path / "bad")) / "model.safetensors"
    weights = load_file(stored)
    down = weights["model.layers.2.mlp.down_proj.weight"]  # its columns are split
    down[5, 7 + rank * down.shape[1] // 2] = float("nan")
    save_file(weights, stored)
    whose = "rank 1: " if rank else ""
    with pytest.raises(UsageError, match=rf"^{whose}the weights of \S+ can't be used: \S*layers\.2\S* has values"):
        ranked.update_weights(stored.parent)
    assert logprobs(ranked) == expected
    ranked.update_weights(checkpoints[1])  # what was read before is forgotten
    assert logprobs(ranked) != expected
    ranked.update_weights(checkpoints[0])
    assert logprobs(ranked) == expected


def test_weights_that_one_rank_can_not_read_reach_none(
    ranked: LeadingRunner, expected: list[list[Any]], checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    other = save(build("qwen3", intermediate_size=128), tmp_path / "wide")
    with pytest.raises(
        UsageError, match=r"^the weights of \S+ differ from the loaded model's: its intermediate_size is 128"
    ):
        ranked.update_weights(other)
    with without_files(ranked), pytest.raises(UsageError, match="^rank 1: "):
        ranked.update_weights(checkpoints[1])
    assert logprobs(ranked) == expected


def test_a_wake_that_one_rank_can_not_do_leaves_every_rank_asleep(
    ranked: LeadingRunner, expected: list[list[Any]]
) -> None:
    ranked.release(MEMORY_TAGS)
    with without_files(ranked), pytest.raises(UsageError, match="^rank 1: "):
        ranked.restore(MEMORY_TAGS)
    assert not head_of(ranked).any()
    ranked.restore(MEMORY_TAGS)
    assert logprobs(ranked) == expected


class AddsInBuffer:
    """A :class:`RankGroup` with memory of its own, as ranks on GPUs have. Nothing is computed with it."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.buffer = torch.zeros(64)

    def add(self, partial: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def join(self, part: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def share(self, value: torch.Tensor) -> None:
        raise NotImplementedError

    def smallest(self, number: int) -> int:
        raise NotImplementedError


def test_the_buffer_in_which_ranks_add_is_no_weight() -> None:
    """It would be released with the weights, and the other ranks would write to the old address."""
    directory = resolve_checkpoint("synthetic:tiny-moe").path
    group, sizes = AddsInBuffer(), RankSizes(2)
    split = RankSplit(group, read_model_config(directory), sizes)
    weights = load_weights(
        directory, split.config, device=torch.device("cpu"), dtype=torch.float32, scaled_products=False, split=split
    )
    found = named_weights(weights)
    assert found and all(tensor is not group.buffer for tensor in found.values())
