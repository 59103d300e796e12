"""What runs are compared by: each difference by its name."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from trtx.experiment.conditions import Conditions, differences

_VALUES = st.none() | st.integers(0, 9) | st.sampled_from("xyz") | st.lists(st.sampled_from("xyz"), max_size=2)
_GROUPS = st.dictionaries(st.sampled_from(["a", "b", "c"]), _VALUES, max_size=3)
_CONDITIONS = st.builds(Conditions, _GROUPS, _GROUPS, _GROUPS, _GROUPS, _GROUPS)
_GROUP = st.sampled_from(["model", "load", "machine", "topology", "versions"])


@given(_CONDITIONS)
def test_a_run_does_not_differ_from_itself(conditions: Conditions) -> None:
    assert differences(conditions, conditions) == ()


@given(_CONDITIONS, _CONDITIONS, _GROUP)
def test_whatever_differs_is_named_on_whichever_side_it_stands(one: Conditions, other: Conditions, group: str) -> None:
    found = {difference.name for difference in differences(one, other)}
    assert found == {difference.name for difference in differences(other, one)}
    changed = replace(one, **{group: getattr(one, group) | {"new": {"inner": 1}}})
    assert [(each.name, each.before, each.now) for each in differences(one, changed)] == [
        (f"{group}.new.inner", None, 1)
    ]


@given(_CONDITIONS, _CONDITIONS)
def test_what_makes_figures_incomparable_comes_first(one: Conditions, other: Conditions) -> None:
    groups = [difference.group in ("model", "load", "machine") for difference in differences(one, other)]
    assert groups == sorted(groups, reverse=True)
