"""``synthetic:tiny-trained`` has learned something, measured on what it was never trained on."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import pytest
import torch
from text_scores import DIFFICULTIES, perplexity, score_tasks, score_text, size
from train_tiny import initialize, several_questions
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from trtx.checkpoint import resolve_checkpoint
from trtx.checkpoint.held_out import held_out_samples
from trtx.checkpoint.synthetic import TRAINED_DIRECTORY
from trtx.checkpoint.tasks import TASKS, TrainingSample, samples
from trtx.checkpoint.tokenizer import IM_END
from trtx.stats.proportions import wilson_interval

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


def test_held_out_tasks_are_answered_in_both_forms(trained: tuple[Any, Any]) -> None:
    scores = score_tasks(*trained, per_band=12)
    assert {score.task for score in scores} == set(TASKS)
    for score in scores:
        # The bands of one-digit sums have fewer prompts held out than asked for, and are that rare in training.
        if score.count == 12:
            assert min(score.plain, score.chat) >= 0.8 * score.count, score


def test_every_sample_falls_in_one_band_of_its_task() -> None:
    for task, (_, bands) in DIFFICULTIES.items():
        for sample in held_out_samples(task, 100):
            assert sum(low <= size(sample) <= high for low, high in bands) == 1, sample


def test_an_interval_holds_its_share_and_narrows_with_the_count() -> None:
    assert wilson_interval(196, 200) == pytest.approx((0.9497, 0.9922), abs=1e-4)
    assert wilson_interval(200, 200) == pytest.approx((0.9812, 1.0), abs=1e-4)


def test_questions_about_one_table_are_a_conversation_with_its_own_answers(trained: tuple[Any, Any]) -> None:
    table = TrainingSample("look-up", "", "", "cup is red, lion is 7, sun is dark")
    turns = several_questions(table, random.Random(0))
    said = "".join(prompt + answer for prompt, answer in turns)
    asked = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end|>", said)
    messages = []
    for question, (_, answer) in zip([q for q in asked if q], turns, strict=True):
        name, value = re.split(r" ->|\?", question.rsplit(". ", 1)[-1])[0].removeprefix("What is "), answer
        assert f"{name} is {value.removesuffix('<|im_end|>')}" in table.key
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer[: -len(IM_END)]}]
    assert len(turns) == 3
    assert trained[1].apply_chat_template(messages, tokenize=False) == said + "\n"


def test_the_first_layer_begins_with_heads_that_look_one_to_four_tokens_back() -> None:
    torch.manual_seed(0)
    config = Qwen3Config.from_pretrained(TRAINED_DIRECTORY)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    initialize(model)
    ids = torch.randint(5, config.vocab_size, (1, 64))
    with torch.inference_mode():
        first = model(ids, output_attentions=True, use_cache=False).attentions[0][0]
    for head, attention in enumerate(first):
        back = attention.diagonal(-(head + 1))
        assert back.mean() > 0.5, head
        assert attention[8:].argmax(-1).tolist() == [at - head - 1 for at in range(8, 64)], head


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
