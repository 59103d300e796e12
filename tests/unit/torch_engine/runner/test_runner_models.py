"""The decoder against transformers' own models: tokens equal, logprobs close, however the work is cut up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from examples import first_of
from runner_player import FAMILIES, Player, build, random_prompt, reference_tokens, save
from transformers import PreTrainedModel

from trtx.torch_engine.llmapi.sampling import SamplingParams
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner

pytestmark = pytest.mark.slow

LENGTHS = (1, 2, 7, 8, 9, 31, 33, 70, 100)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build(request.param)


@pytest.fixture(scope="module")
def model_dir(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def runner(model_dir: Path) -> TorchRunner:
    return create_runner(
        RunnerArgs(model_dir=model_dir, device="cpu", tokens_per_block=8, max_tokens=4096, max_batch_size=16)
    )


def test_greedy_tokens_of_a_mixed_batch_equal_transformers(model: PreTrainedModel, runner: TorchRunner) -> None:
    player = Player(runner)
    prompts = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    tokens = player.finish([player.add(prompt) for prompt in prompts], 24)
    assert tokens == [reference_tokens(model, prompt, 24) for prompt in prompts]


def test_logprobs_are_close_to_transformers_at_every_position(model: PreTrainedModel, runner: TorchRunner) -> None:
    prompt = random_prompt(90, 3)
    player = Player(runner)
    playing = player.add(prompt, sampling=SamplingParams(prompt_logprobs=3, logprobs=3))
    player.step([playing])
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), dim=-1)
    entries = playing.results[0].prompt_logprobs
    assert entries is not None and playing.results[0].logprobs is not None
    assert len(entries) == len(prompt) - 1
    for position, (entry, following) in enumerate(zip(entries, prompt[1:], strict=True)):
        assert entry[following].logprob == pytest.approx(expected[position, following].item(), abs=2e-4)
        assert entry[following].rank == 1 + int((expected[position] > expected[position, following]).sum())
        assert {token for token, value in entry.items() if value.rank == 1} == {int(expected[position].argmax())}
    last = {token: value.logprob for token, value in playing.results[0].logprobs.items()}
    top = expected[-1].topk(3)
    assert last == pytest.approx(dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)), abs=2e-4)


@pytest.mark.parametrize("chunk", first_of(1, [5, 1, 8, 64]))
def test_a_prompt_in_chunks_gives_the_tokens_of_the_whole(runner: TorchRunner, chunk: int) -> None:
    player = Player(runner)
    prompts = [random_prompt(length, length) for length in (6, 40, 75)]
    whole = player.finish([player.add(prompt, room=16) for prompt in prompts], 16)
    assert player.finish([player.add(prompt, room=16) for prompt in prompts], 16, chunk=chunk) == whole


def test_chunks_join_to_the_prompt_logprobs_of_the_whole(runner: TorchRunner) -> None:
    player, sampling = Player(runner), SamplingParams(prompt_logprobs=1)
    whole, cut = (player.add(random_prompt(50, 1), room=1, sampling=sampling) for _ in range(2))
    player.finish([whole], 1)
    player.finish([cut], 1, chunk=7)
    joined = [entry for result in cut.results for entry in result.prompt_logprobs or []]
    expected = whole.results[0].prompt_logprobs
    assert expected is not None and [list(entry) for entry in joined] == [list(entry) for entry in expected]
    for entry, other in zip(joined, expected, strict=True):
        assert [v.logprob for v in entry.values()] == pytest.approx([v.logprob for v in other.values()], abs=1e-4)


def test_cached_prefix_blocks_of_another_sequence_give_the_tokens_of_a_cold_start(runner: TorchRunner) -> None:
    player = Player(runner)
    prefix = random_prompt(40, 5)  # five whole blocks of eight
    first, cold = player.add(prefix + random_prompt(9, 6)), player.add(prefix + random_prompt(13, 7))
    player.finish([first, cold], 12)
    warm = player.add_in(9, cold.prompt, 13 + 12, computed=40)
    warm.block_ids[:0] = first.block_ids[:5]
    for own, cached in zip(warm.more_blocks, first.more_blocks, strict=True):
        own[:0] = cached[:5]
    assert player.finish([warm], 12) == [cold.output]


def test_a_preempted_sequence_resumes_in_another_slot_with_the_same_tokens(runner: TorchRunner) -> None:
    player = Player(runner)
    calm, moved = (player.add(random_prompt(30, 8), room=40) for _ in range(2))
    player.finish([calm], 30)
    player.finish([moved], 11)
    resumed = player.add_in(12, moved.prompt, 80, output=list(moved.output))
    assert player.finish([resumed], 30, chunk=16) == [calm.output]


def test_a_slot_that_is_taken_again_forgets_the_sequence_before(model: PreTrainedModel, runner: TorchRunner) -> None:
    player = Player(runner)
    player.finish([player.add_in(4, random_prompt(60, 1), 100)], 20)
    prompt = random_prompt(17, 2)
    tokens = player.finish([player.add_in(4, prompt, 60)], 20)
    assert tokens == [reference_tokens(model, prompt, 20)]


def test_blocks_appended_while_decoding_are_used(model: PreTrainedModel, runner: TorchRunner) -> None:
    player, prompt = Player(runner), random_prompt(8, 4)
    playing = player.add_in(0, prompt, 8)
    while len(playing.output) < 30:
        if len(playing.prompt) + len(playing.output) > 8 * len(playing.block_ids):
            for blocks in (playing.block_ids, *playing.more_blocks):
                blocks += player.blocks(1)
        player.step([playing])
    assert playing.output == reference_tokens(model, prompt, 30)


def test_kv_is_written_to_the_listed_blocks_alone(runner: TorchRunner) -> None:
    player = Player(runner)
    playing = player.add(random_prompt(21, 0), room=3)
    player.finish([playing], 3)
    touched = runner.pool.flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert set(touched) == set(playing.block_ids).union(*playing.more_blocks)
    assert runner.pool.is_contiguous() and runner.pool[0].nbytes == runner.geometry.block_bytes
