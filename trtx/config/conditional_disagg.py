"""The value of ``--conditional-disagg``: by which policy Dynamo's router leaves a prompt to a decode worker."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType

from trtx.config.wording import quoted

_ISL = ("eff_isl_threshold", "eff_isl_ratio_threshold")
_LOAD = "prefill_busy_threshold"
_READS: Mapping[str, tuple[str, ...]] = {  # policy -> the thresholds that it compares
    "isl_bounding": _ISL,
    "prefill_load": (_LOAD,),
    "isl_or_load": (*_ISL, _LOAD),
}
POLICIES = tuple(_READS)
"""The policies of Dynamo 1.6.1."""
_OF_ALL = "decode_busy_threshold"
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def checked_policy(text: str) -> str:
    """Returns ``text`` if it is a policy of Dynamo's router with thresholds that this policy reads.

    The form is ``POLICY[,THRESHOLD=NUMBER…]``. Raises ValueError, whose message begins with the name of the field.
    """
    policy, *settings = text.split(",")
    if policy not in _READS:
        raise ValueError(
            f"conditional_disagg {quoted(text)} begins with no policy; expected {', '.join(POLICIES[:-1])} or "
            f"{POLICIES[-1]}, such as isl_bounding,eff_isl_threshold=512"
        )
    known, seen = (*_READS[policy], _OF_ALL), set[str]()
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or name not in known:
            raise ValueError(
                f"conditional_disagg {quoted(text)} has {quoted(setting)}; expected THRESHOLD=NUMBER with a threshold "
                f"of {policy}: {', '.join(known)}"
            )
        if name in seen:
            raise ValueError(f"conditional_disagg {quoted(text)} sets {name} twice; leave one of them out")
        seen.add(name)
        if problem := _problem(name, value):
            raise ValueError(f"conditional_disagg {quoted(text)}: {name} is {quoted(value)}; expected {problem}")
    if _LOAD in known and _LOAD not in seen:
        raise ValueError(
            f"conditional_disagg {quoted(text)} lacks {_LOAD}, which {policy} needs; add ,{_LOAD}=0.5 to take a "
            "prefill worker for busy once it has half a step of prompt tokens to compute"
        )
    return text


def router_settings(text: str) -> Mapping[str, str | int | float]:
    """The fields of Dynamo's ``--router-conditional-disagg-config`` for a valid value."""
    policy, *settings = text.split(",")
    named = (setting.partition("=")[::2] for setting in settings)
    return MappingProxyType(
        {"policy": policy} | {name: int(value) if name == _ISL[0] else float(value) for name, value in named}
    )


def reads_cache(text: str) -> bool:
    """Whether the policy of a valid value compares what the decode worker caches."""
    return _ISL[0] in _READS[text.partition(",")[0]]


def _problem(name: str, value: str) -> str:
    """What was expected in place of ``value``; "" if Dynamo's router accepts it, and a prompt can fulfil it."""
    number = float(value) if _NUMBER.fullmatch(value) else math.nan
    if name == _ISL[0]:
        return "" if value.isdecimal() and number >= 1 else "a whole number of tokens from 1 on"
    if name == _ISL[1]:
        return "" if 0 < number <= 1 else "a number above 0 up to 1"
    if name == _LOAD:
        return "" if number >= 0 else "a number from 0 on"
    return "" if number > 0 else "a number above 0"
