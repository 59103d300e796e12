"""Figures of fidelity: means over tokens, intervals over prompts, and what is judged of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from trtx.bench.judge.judgement import Verdict
from trtx.bench.named_models import OtherModels
from trtx.evals.fidelity.figures import mean_figure, part_figures, share_figure
from trtx.evals.fidelity.forms import ComparedSequence, PartFigures, TopologyFidelity
from trtx.evals.fidelity.gate import judge_fidelity
from trtx.evals.forms import Unanswered

pytestmark = pytest.mark.slow


def sequence(index: int, kl: list[float], prompt_length: int = 3, agrees: bool = True, **more: Any) -> ComparedSequence:
    """``prompt_length`` − 1 positions of the prompt without divergence, then ``kl`` of the text."""
    before = [0.0] * (prompt_length - 1)
    count = len(before) + len(kl)
    fields: dict[str, Any] = {
        "agrees": tuple([True] * len(before) + [agrees] * len(kl)),
        "shared": (0.9,) * count,
        "reference_logprob": (math.log(0.5),) * count,
        "served_logprob": (math.log(0.25),) * count,
    }
    return ComparedSequence(index, "key", prompt_length, tuple(before + kl), **fields | more)


def figures(sequences: list[ComparedSequence]) -> PartFigures:
    found = part_figures(sequences, "text")
    assert found is not None
    return found


def test_a_mean_is_of_tokens_and_parts_are_apart() -> None:
    found = figures([sequence(0, [0.1, 0.3]), sequence(1, [0.5], agrees=False)])
    assert found.positions == 3 and found.kl.value == pytest.approx(0.3)
    assert found.agreement.value == pytest.approx(2 / 3) and found.shared == pytest.approx(0.9)
    assert (found.reference_perplexity, found.served_perplexity) == (pytest.approx(2), pytest.approx(4))
    assert found.perplexity_increase_pct.value == pytest.approx(100)
    prompts = part_figures([sequence(0, [0.1]), sequence(1, [0.5])], "prompt")
    assert prompts is not None and (prompts.positions, prompts.kl.value) == (4, 0.0)
    assert part_figures([sequence(0, [0.1], prompt_length=1)], "prompt") is None


def test_tokens_of_one_prompt_do_not_narrow_an_interval() -> None:
    """16 prompts that say the same at each of their 100 tokens are 16 values, and no more."""
    values = np.random.default_rng(1).uniform(0, 1, 16).tolist()
    once, often = (mean_figure([of * value for value in values], [of] * 16, reach=0) for of in (1, 100))
    assert once.interval is not None and often.interval is not None
    assert (often.interval.low, often.interval.high) == pytest.approx((once.interval.low, once.interval.high))
    assert once.interval.high - once.interval.low > 0.15


def test_few_prompts_have_no_interval_and_full_agreement_has_no_width_of_zero() -> None:
    assert mean_figure([1.0] * 9, [2] * 9, reach=1).interval is None
    full = share_figure([5.0] * 40, [5] * 40)
    assert full.interval is not None and (full.value, full.interval.high) == (1, 1) and 0.9 < full.interval.low < 0.92


def test_prompts_that_all_say_the_same_do_not_say_it_of_others() -> None:
    """As many of others as Wilson's interval says may be as far off as prompts are from one another."""
    assert mean_figure([0.5] * 40, [5] * 40, reach=0).interval is None
    equal, one_off = (mean_figure([0.0] * 39 + [last], [5] * 40, reach=0.5, least=0.0) for last in (0.0, 1.0))
    assert equal.interval is not None and one_off.interval is not None
    assert (equal.interval.low, equal.interval.high) == (0, pytest.approx(0.5 * 0.0876, abs=1e-4))
    assert one_off.interval.low == 0 and one_off.interval.high == pytest.approx(0.005 + 0.5 * 0.0876, abs=1e-4)
    full, one_wrong = (share_figure([5.0] * 39 + [last], [5] * 40).interval for last in (5.0, 4.0))
    assert full is not None and one_wrong is not None and full.low - 0.006 < one_wrong.low < full.low


def test_fewer_tokens_that_agree_never_pass_where_more_do_not() -> None:
    """Of 192 prompts with 11 tokens each, some with one that is another."""
    lows = []
    for wrong in (0, 1, 5, 9, 10, 50):
        found = share_figure([10.0] * wrong + [11.0] * (192 - wrong), [11] * 192).interval
        assert found is not None and found.low < found.estimate <= found.high
        lows.append(found.low)
    assert lows[:4] == sorted(lows[:4], reverse=True) and lows[0] > 0.97 and lows[3] > 0.97 and lows[5] < lows[4]


def test_an_engine_that_is_the_reference_to_the_last_bit_passes_what_its_prompts_can_tell() -> None:
    def judged(count: int, limit: float) -> Verdict:
        lines = []
        for index in range(count):
            own = (-1.0 - index % 5,) * 6
            lines.append(sequence(index, [0.0] * 4, reference_logprob=own, served_logprob=own))
        found = TopologyFidelity("agg", "engine_data", 20, count, count, (figures(lines),), ())
        return [one.verdict for one in judge_fidelity(found, max_kl=limit)][1]

    assert (judged(40, 0.2), judged(40, 0.01), judged(4000, 0.01)) == (Verdict.PASS, Verdict.NO_VERDICT, Verdict.PASS)


def test_figures_that_are_all_alike_have_no_verdict_and_say_why() -> None:
    found = topology([0.0] * 40)
    (whole, kl) = judge_fidelity(found, max_kl=0.1)
    assert whole.verdict is Verdict.PASS and kl.verdict is Verdict.NO_VERDICT
    assert kl.reason == "all 40 sequences say the same, which does not show how far off others may be"


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    draw = np.random.default_rng(7)
    held = 0
    for _ in range(200):
        counts = draw.integers(5, 60, 60)
        means = draw.gamma(2, 0.5, 60)  # of each prompt; 1 in the long run
        found = mean_figure((means * counts).tolist(), counts.tolist(), reach=0).interval
        assert found is not None
        held += 1.0 in found
    assert held > 180


def topology(kl: list[float], shared: float = 0.9, **more: Any) -> TopologyFidelity:
    sequences = [sequence(index, [value] * 4, shared=(shared,) * 6) for index, value in enumerate(kl)]
    fields: dict[str, Any] = {"sequences": len(kl), "answered": len(kl), "unanswered": (), "note": None}
    return TopologyFidelity("agg", "engine_data", 20, parts=(figures(sequences),), **fields | more)


def verdicts(found: TopologyFidelity, **bounds: float) -> list[Verdict]:
    return [one.verdict for one in judge_fidelity(found, **bounds)]


KL = [0.1, 0.2] * 10  # 0.15, and an interval from about 0.13 to 0.17


@pytest.mark.parametrize(
    ("bounds", "verdict"),
    [
        ({"max_kl": 0.3}, Verdict.PASS),
        ({"max_kl": 0.15}, Verdict.NO_VERDICT),
        ({"max_kl": 0.05}, Verdict.MISSED),
        ({"min_agreement": 0.8}, Verdict.PASS),
        ({"min_agreement": 0.95}, Verdict.NO_VERDICT),
    ],
)
def test_a_bound_is_decided_on_the_interval(bounds: dict[str, float], verdict: Verdict) -> None:
    assert verdicts(topology(KL), **bounds) == [Verdict.PASS, verdict]


def test_an_agreement_below_its_bound_is_missed() -> None:
    far = [sequence(index, [1.0] * 4, agrees=index % 2 == 0) for index in range(20)]
    found = TopologyFidelity("agg", "engine_data", 20, 20, 20, (figures(far),), ())
    assert verdicts(found, min_agreement=0.9) == [Verdict.PASS, Verdict.MISSED]


def test_a_small_divergence_of_little_that_is_seen_is_no_pass_and_a_large_one_is_missed_all_the_same() -> None:
    assert verdicts(topology(KL, shared=0.1), max_kl=0.3)[1] is Verdict.NO_VERDICT
    assert verdicts(topology(KL, shared=0.1), max_kl=0.05)[1] is Verdict.MISSED


def test_nothing_passes_without_the_sequences_that_nobody_compared() -> None:
    lost = topology(KL, sequences=21, unanswered=(Unanswered("HTTP 500", 1, 20),))
    assert verdicts(lost, max_kl=0.3, min_agreement=0.8) == [Verdict.FAILED, Verdict.NO_VERDICT, Verdict.NO_VERDICT]
    assert verdicts(lost, max_kl=0.05)[1] is Verdict.MISSED
    none = TopologyFidelity("agg", None, None, 20, 0, (), (), "the server gives no log-probabilities of prompts")
    judged = list(judge_fidelity(none, 0.1, 0.9))
    assert [one.verdict for one in judged] == [Verdict.NO_VERDICT] * 3
    assert all("no log-probabilities" in one.reason for one in judged)


def test_answers_of_several_models_are_no_verdict_and_one_other_name_is_an_alias() -> None:
    several = topology(KL, others=OtherModels(True, "answers name several models"))
    assert verdicts(several, max_kl=0.3) == [Verdict.PASS, Verdict.NO_VERDICT, Verdict.PASS]
    assert verdicts(topology(KL, others=OtherModels(False, "an alias")), max_kl=0.3) == [Verdict.PASS] * 2


def test_without_bounds_only_completeness_is_judged() -> None:
    assert verdicts(topology(KL)) == [Verdict.PASS]
