"""Guided decoding with a real model: the same tokens however they are computed, and logprobs of the model's own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_player import Wish, assert_equal
from examples import first_of
from guided_player import GRAMMARS, follows_its_grammar, guided_workload, served_guided
from runner_player import build, random_prompt, save, small_runner

from trtx.torch_engine.llmapi.guided_decoding import GuidedDecodingParams

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3"), tmp_path_factory.mktemp("checkpoint"))


new_runner = partial(small_runner, dtype="float32", guided=True)


@pytest.mark.parametrize("changes", first_of(1, [{"num_blocks": 11}, {}, {"deterministic": True}]), ids=str)
def test_tokens_are_the_same_with_and_without_overlap(checkpoint: Path, changes: dict[str, Any]) -> None:
    one, other = new_runner(checkpoint, **changes), new_runner(checkpoint, **changes)
    for seed in range(2):
        wishes = guided_workload(seed)
        found = served_guided(one, wishes, overlap=True)
        assert_equal(found, served_guided(other, wishes, overlap=False, step_tokens=9), wishes)
        for answer, wish in zip((found[at] for at in range(len(wishes))), wishes, strict=True):
            follows_its_grammar(wish, answer)


def test_unguided_requests_are_bit_for_bit_the_same_beside_guided_ones(checkpoint: Path) -> None:
    one = new_runner(checkpoint, deterministic=True)
    wishes = guided_workload(5, share=0.6)
    for wish in wishes:
        wish.params["logprobs"] = 2
    beside = served_guided(one, wishes, overlap=True)
    others = [at for at, wish in enumerate(wishes) if wish.params["guided_decoding"] is None]
    assert 0 < len(others) < len(wishes)
    for at in others:
        alone = served_guided(one, [Wish(0, wishes[at].prompt, wishes[at].params, None)], overlap=False)[0]
        assert (alone.tokens, alone.logprobs) == (beside[at].tokens, beside[at].logprobs)


def test_logprobs_of_guided_tokens_are_those_of_the_models_own_logits(checkpoint: Path) -> None:
    """A prompt that ends with the answer has the same logprobs, and no grammar."""
    one = new_runner(checkpoint)
    params = {"max_tokens": 30, "end_id": 95, "logprobs": 1, "temperature": 1.0, "seed": 3}
    for at, grammar in enumerate(GRAMMARS):
        guided = params | {"guided_decoding": GuidedDecodingParams(**grammar)}
        prompt = random_prompt(7, at)
        answer = served_guided(one, [Wish(0, prompt, guided, None)], overlap=True)[0]
        free = Wish(0, prompt + answer.tokens, {"max_tokens": 1, "end_id": -1, "prompt_logprobs": 1}, None)
        own = served_guided(one, [free], overlap=True)[0].prompt_logprobs[len(prompt) - 1 :]
        assert len(own) == len(answer.tokens)
        for token, entry, same in zip(answer.tokens, answer.logprobs, own, strict=True):
            assert entry[token].logprob == pytest.approx(same[token].logprob, abs=1e-4)
