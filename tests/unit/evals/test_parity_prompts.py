"""What parity sends: lengths, families, cancellations; and what it reads of a stream."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trtx.checkpoint import resolve_checkpoint
from trtx.errors import UsageError
from trtx.evals.parity import (
    ParityAnswer,
    Prompt,
    RequestShape,
    make_prompts,
    ordinary_ids,
    read_answers,
    write_answers,
)
from trtx.evals.parity.asking import Server, request_body

SHAPE = RequestShape(prompts=64, longest=200, osl=16, seed=3)


@pytest.fixture(scope="module")
def ids() -> tuple[int, ...]:
    return ordinary_ids(resolve_checkpoint("synthetic:tiny").path)


def test_equal_shapes_give_equal_prompts_and_another_seed_others(ids: tuple[int, ...]) -> None:
    assert make_prompts(ids, SHAPE) == make_prompts(ids, SHAPE)
    assert make_prompts(ids, SHAPE) != make_prompts(ids, RequestShape(64, 200, 16, seed=4))


@pytest.mark.parametrize("longest", [4, 5, 33, 200])
def test_no_prompt_is_empty_or_longer_than_asked(ids: tuple[int, ...], longest: int) -> None:
    prompts = make_prompts(ids, RequestShape(200, longest, 2, seed=0))
    lengths = {len(one.token_ids) for one in prompts}
    assert min(lengths) >= 1 and max(lengths) <= longest
    assert sum(one.is_compared for one in prompts) == 200
    assert [one.index for one in prompts] == list(range(len(prompts)))


def test_lengths_are_mixed_and_families_share_a_beginning_of_blocks(ids: tuple[int, ...]) -> None:
    prompts = [one for one in make_prompts(ids, SHAPE) if one.is_compared]
    assert {len(one.token_ids) < 32 for one in prompts} == {True, False}
    kin: dict[int, list[Prompt]] = {}
    for one in prompts:
        if one.family is not None:
            kin.setdefault(one.family, []).append(one)
    assert sum(map(len, kin.values())) == len(prompts) // 2
    for members in kin.values():
        beginnings = {one.token_ids[:50] for one in members}  # a quarter of the longest
        assert len(members) == 4 and len(beginnings) == 1
        assert len({one.token_ids for one in members}) == 4


def test_half_of_either_kind_ask_for_their_prompts_log_probabilities(ids: tuple[int, ...]) -> None:
    prompts = [one for one in make_prompts(ids, SHAPE) if one.is_compared]
    for is_kin in (True, False):
        kind = [one.asks_prompt_logprobs for one in prompts if (one.family is not None) is is_kin]
        assert kind.count(True) == kind.count(False) == len(kind) / 2


def test_some_are_cancelled_at_once_and_some_in_the_middle(ids: tuple[int, ...]) -> None:
    after = {one.cancel_after for one in make_prompts(ids, SHAPE) if not one.is_compared}
    assert 0 in after and any(value and value > 1 for value in after)


def test_an_answer_is_greedy_salted_and_exactly_as_long_as_asked() -> None:
    server = Server("http://127.0.0.1:1", "m")
    body = request_body(server, Prompt(0, (5, 6), None, True, None), osl=9, salt="kv")
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"], body["temperature"]) == (9, 9, True, 0.0)
    assert body["prompt_logprobs"] == 1 and body["nvext"]["cache_salt"] == "kv"
    assert "prompt_logprobs" not in request_body(server, Prompt(0, (5, 6), None, False, None), osl=9, salt="kv")
    plain = replace(server, takes_nvext=False)
    assert "nvext" not in request_body(plain, Prompt(0, (5, 6), None, False, None), osl=9, salt="kv")


@pytest.mark.parametrize("spoil", [lambda path: None, lambda path: path.write_text("{}")], ids=["none", "no tokenizer"])
def test_a_model_without_a_tokenizer_is_refused_with_what_to_bring(
    spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    spoil(tmp_path / "tokenizer.json")
    with pytest.raises(UsageError, match=r"needs the model's tokenizer\.json"):
        ordinary_ids(tmp_path)


def test_a_kept_answer_that_was_changed_is_refused_by_line_and_field(tmp_path: Path) -> None:
    kept = [
        ParityAnswer(index, (7,), (-0.5,), ({"7": -0.5},), (-3.0,), "length", 2, 0, {"decode": 1}, 0, 1, None)
        for index in range(2)
    ]
    write_answers(tmp_path, "kv", kept)
    assert read_answers(tmp_path, "kv") == tuple(kept)
    path = tmp_path / "eval" / "kv" / "answers.jsonl"
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{json.dumps(json.loads(second) | {'token_ids': ['x']})}\n")
    with pytest.raises(UsageError, match=r"answers\.jsonl, line 2 .*token_ids\.0"):
        read_answers(tmp_path, "kv")


def test_a_servers_words_may_hold_whatever_ends_a_line_elsewhere(tmp_path: Path) -> None:
    kept = ParityAnswer(0, (), (), (), (), None, None, None, {}, None, 3, "HTTP 500: one\u2028two\x85three")
    write_answers(tmp_path, "kv", [kept, replace(kept, index=1)])
    assert read_answers(tmp_path, "kv") == (kept, replace(kept, index=1))
