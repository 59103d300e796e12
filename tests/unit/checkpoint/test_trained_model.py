"""``synthetic:tiny-trained`` has learned something, measured on what it was never trained on."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trtx.checkpoint import resolve_checkpoint
from trtx.checkpoint.held_out import held_out_samples, perplexity, score_tasks, score_text
from trtx.checkpoint.tasks import TASKS, samples

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any]:
    torch.set_num_threads(1)
    path = resolve_checkpoint("synthetic:tiny-trained").path
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), AutoTokenizer.from_pretrained(path)


def test_no_sample_is_in_both_splits() -> None:
    for task in TASKS:
        train = {s.key for s in itertools.islice(samples(task, "train", 0), 2000)}
        held_out = {s.key for s in held_out_samples(task, 200)}
        assert train
        assert held_out
        assert not train & held_out


def test_a_sum_keeps_its_split_when_its_terms_trade_places() -> None:
    train = {s.key for s in itertools.islice(samples("addition-2", "train", 1), 2000)}
    for sample in held_out_samples("addition-2", 200, seed=2):
        first, second = sample.key.split("+")
        assert int(first) <= int(second)
        assert sample.key not in train


def test_held_out_sums_and_json_are_answered_in_both_forms(trained: tuple[Any, Any]) -> None:
    scores = {score.task: score for score in score_tasks(*trained, per_task=30)}
    for task in ("addition-1", "addition-2", "subtraction", "json"):
        assert min(scores[task].plain, scores[task].chat) >= 0.8, scores[task]
    # Chance is one word of 186 a word, and one value of the dozens in use.
    assert max(scores["copying"].plain_perplexity, scores["copying"].chat_perplexity) < 10
    assert max(scores["look-up"].plain_perplexity, scores["look-up"].chat_perplexity) < 5


def test_text_is_far_from_chance(trained: tuple[Any, Any]) -> None:
    assert score_text(*trained, count=40) < 60  # a uniform guess: 1,024


def test_a_chat_answer_ends_by_itself(trained: tuple[Any, Any]) -> None:
    model, tokenizer = trained
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 5 + 9?"}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    output = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(output) == "14<|im_end|>"


def test_perplexity_is_of_the_scored_tokens_alone() -> None:
    def halves(ids: Any) -> list[float]:
        return [0.0] * (len(ids) - 3) + [-0.6931471805599453] * 2

    assert perplexity([([1, 2, 3, 4, 5], 3)], halves) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="no token to score"):
        perplexity([], halves)
