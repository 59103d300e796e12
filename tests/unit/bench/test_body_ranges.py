"""What of a request's body is refused before anything starts, and that no worker refuses what is left."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtx.bench.body_ranges import RANGES, check_body
from trtx.errors import UsageError
from trtx.worker.requests.fields import FIELDS


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("temperature", 5.0, "temperature is 5.0, but Dynamo's frontend accepts only "
         "a number from 0 to 2 and would refuse every request; change it"),
        ("temperature", "hot", "temperature is 'hot'"),
        ("temperature", True, "temperature is True"),
        ("temperature", 10**400, "temperature is "),
        ("top_p", 2, "accepts only a number above 0 up to 1 and would refuse every request; change it"),
        ("top_k", -5, "accepts only a whole number from -1 on and would refuse every request; change it"),
        ("top_k", 1.5, "top_k is 1.5"),
        ("repetition_penalty", 0, "accepts only a number above 0 up to 2 and would refuse every request; change it"),
        ("frequency_penalty", -2.5, "accepts only a number from -2 to 2 and would refuse every request; change it"),
        ("seed", 2**63, "accepts only a whole number of 64 bits and would refuse every request; change it"),
        ("min_p", [0.5], "min_p is [0.5]"),
    ],
)  # fmt: skip
def test_a_value_that_the_frontend_refuses_is_one_sentence(name: str, value: Any, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        check_body({"nvext": {}, name: value})
    assert said in str(raised.value)
    assert len(str(raised.value)) < 300


@given(st.data())
def test_what_is_within_is_taken_and_the_workers_take_it_too(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(RANGES)))
    asked = RANGES[name]
    ends = [asked.high] if asked.is_open else [asked.low, asked.high]
    within = st.integers(math.ceil(asked.low), math.floor(asked.high)) if asked.is_whole else st.floats(
        asked.low, asked.high, exclude_min=asked.is_open
    )  # fmt: skip
    value = data.draw(st.sampled_from(ends) | within)
    check_body({name: value, "temperature": None, "no_such_field": 7})
    read = FIELDS["sampling_options"][name].read
    assert read is not None
    if not (asked.is_open and value < 0.01):  # which a worker may round
        read(name, value)
