"""The value of --conditional-disagg: what Dynamo's router is given, and what is refused before anything starts."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from trtx.config import TopologySpec
from trtx.config.conditional_disagg import checked_policy, reads_cache, router_settings


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("isl_bounding", {"policy": "isl_bounding"}),
        (
            "isl_bounding,eff_isl_threshold=512,eff_isl_ratio_threshold=1",
            {"policy": "isl_bounding", "eff_isl_threshold": 512, "eff_isl_ratio_threshold": 1.0},
        ),
        (
            "prefill_load,prefill_busy_threshold=0,decode_busy_threshold=0.9",
            {"policy": "prefill_load", "prefill_busy_threshold": 0.0, "decode_busy_threshold": 0.9},
        ),
        (
            "isl_or_load,prefill_busy_threshold=1.5",
            {"policy": "isl_or_load", "prefill_busy_threshold": 1.5},
        ),
    ],
)
def test_a_policy_and_its_thresholds_are_the_routers(text: str, settings: dict[str, object]) -> None:
    assert TopologySpec(conditional_disagg=text).conditional_disagg == text
    found = router_settings(text)
    assert found == settings
    assert all(isinstance(found[name], type(value)) for name, value in settings.items())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "begins with no policy; expected isl_bounding, prefill_load or isl_or_load"),
        ("isl-bounding", "begins with no policy"),
        ("eff_isl_threshold=512", "begins with no policy"),
        ("isl_bounding,", "has ''; expected THRESHOLD=NUMBER with a threshold of isl_bounding: eff_isl_threshold, "),
        ("isl_bounding,prefill_busy_threshold=1", "has 'prefill_busy_threshold=1'; expected"),
        ("prefill_load,eff_isl_threshold=1,prefill_busy_threshold=1", "has 'eff_isl_threshold=1'; expected"),
        ("isl_bounding,eff_isl_threshold=1,eff_isl_threshold=2", "sets eff_isl_threshold twice"),
        ("isl_bounding,eff_isl_threshold=0", "eff_isl_threshold is '0'; expected a whole number of tokens from 1 on"),
        ("isl_bounding,eff_isl_threshold=1.5", "a whole number of tokens from 1 on"),
        ("isl_bounding,eff_isl_threshold=²", "a whole number of tokens from 1 on"),
        ("isl_bounding,eff_isl_ratio_threshold=1.1", "a number above 0 up to 1"),
        ("isl_bounding,eff_isl_ratio_threshold=nan", "a number above 0 up to 1"),
        ("isl_bounding,decode_busy_threshold=0", "a number above 0"),
        ("prefill_load,prefill_busy_threshold=-1", "a number from 0 on"),
        ("prefill_load", "lacks prefill_busy_threshold, which prefill_load needs; add ,prefill_busy_threshold=0.5"),
        ("isl_or_load,eff_isl_threshold=9", "lacks prefill_busy_threshold, which isl_or_load needs"),
    ],
)
def test_what_can_not_take_effect_is_refused_in_one_sentence(text: str, says: str) -> None:
    with pytest.raises(ValidationError) as refused:
        TopologySpec(conditional_disagg=text)
    (problem,) = refused.value.errors()
    assert problem["msg"].startswith("Value error, conditional_disagg ") and says in problem["msg"]


def test_only_two_policies_compare_what_decode_workers_cache() -> None:
    assert reads_cache(checked_policy("isl_bounding"))
    assert reads_cache(checked_policy("isl_or_load,prefill_busy_threshold=1"))
    assert not reads_cache(checked_policy("prefill_load,prefill_busy_threshold=1"))
