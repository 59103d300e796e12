"""What the proof's figures mean, by hand."""

from __future__ import annotations

import math

import pytest

from trtx.build.proof import Answers, compare


def test_perplexity_is_of_all_tokens_and_its_increase_is_paired() -> None:
    source = Answers([math.log(0.5), math.log(0.5), math.log(0.25), math.log(0.25)], [[1]])
    result = Answers([math.log(0.5), math.log(0.25), math.log(0.25), math.log(0.125)], [[1]])
    proof = compare(source, result)
    assert proof.tokens == 4
    assert proof.source_perplexity == pytest.approx(2**1.5)
    assert proof.perplexity == pytest.approx(4.0)
    assert proof.increase_pct == pytest.approx(100 * (math.sqrt(2) - 1))
    # Losses 0, ln 2, 0, ln 2: a standard deviation of ln 2 / sqrt 3, half of it for four tokens.
    assert proof.standard_error_pct == pytest.approx(100 * math.sqrt(2) * math.log(2) / math.sqrt(3) / 2)


def test_agreement_counts_tokens_up_to_the_first_difference_alone() -> None:
    scored = [-1.0, -2.0]
    source = Answers(scored, [[1, 2, 3, 4], [5, 6], [7]])
    result = Answers(scored, [[1, 2, 9, 4], [5, 6], [7, 8, 8]])
    proof = compare(source, result)
    assert proof.prompts == 3
    assert proof.identical == 1
    assert proof.greedy_agreement == pytest.approx((2 + 2 + 1) / (4 + 2 + 3))


def test_a_model_agrees_with_itself() -> None:
    answers = Answers([-0.5, -1.5, -0.1], [[1, 2], [3]])
    proof = compare(answers, answers)
    assert (proof.increase_pct, proof.standard_error_pct, proof.greedy_agreement, proof.identical) == (0, 0, 1, 2)


def test_answers_to_different_texts_are_not_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        compare(Answers([-1.0], [[1]]), Answers([-1.0, -2.0], [[1]]))
