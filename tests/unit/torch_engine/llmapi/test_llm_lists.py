"""Lists of parameters beside a list of prompts: one for each, or nothing is submitted."""

from __future__ import annotations

from typing import Any

import pytest

from trtx.torch_engine.llmapi.llm import LLM
from trtx.torch_engine.llmapi.results import DisaggregatedParams
from trtx.torch_engine.llmapi.sampling import SamplingParams


@pytest.mark.parametrize(
    ("inputs", "given", "says"),
    [
        (["a b", "c d"], {"sampling_params": [SamplingParams()]}, "sampling_params has length 1 and inputs 2"),
        (["a b", "c d"], {"sampling_params": []}, "sampling_params has length 0 and inputs 2"),
        (["a b"], {"sampling_params": [SamplingParams()] * 3}, "sampling_params has length 3 and inputs 1"),
        ("a b", {"sampling_params": [SamplingParams()] * 2}, "sampling_params has length 2 and inputs 1"),
        (
            [[5, 6], [7]],
            {"sampling_params": [SamplingParams()] * 2, "disaggregated_params": [DisaggregatedParams()]},
            "disaggregated_params has length 1 and inputs 2; expected one for each, or one for all",
        ),
    ],
)
def test_a_list_of_another_length_is_refused_before_anything_is_submitted(
    inputs: Any, given: dict[str, Any], says: str
) -> None:
    llm = LLM.__new__(LLM)  # it has no engine: to submit the first prompt would be an AttributeError
    with pytest.raises(ValueError, match=says):
        llm.generate(inputs, **given)
