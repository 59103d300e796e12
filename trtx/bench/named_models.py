"""Compares the model names in answers with the requested model. Pure.

An answer without a name proves nothing. A single different name may be an alias that a gateway resolved or a different
model; a client can't tell, so the user gets a warning. Several names mean that several models answered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from trtx.bench.answers import model_name
from trtx.config.wording import quoted

_LONGEST = 60  # maximum length of a name in a sentence, in characters
_MOST_NAMES = 3  # maximum number of names in a sentence


@dataclass(frozen=True, slots=True)
class OtherModels:
    """Answers that name a model other than the requested one."""

    are_several: bool
    sentence: str  # short, without a full stop


def other_models(asked: str, answers: Iterable[Iterable[str]]) -> OtherModels | None:
    """Checks the names in ``answers``, one list per answer. None if no answer names another model."""
    counts = Counter(name for names in answers for name in dict.fromkeys(names))
    if counts.keys() <= {model_name(asked)}:
        return None
    requested = f"{quoted(asked, _LONGEST)} was requested"
    if len(counts) == 1:
        return OtherModels(False, f"answers name model {quoted(next(iter(counts)), _LONGEST)}, but {requested}")
    names = [f"{quoted(name, _LONGEST)} ({count})" for name, count in counts.most_common(_MOST_NAMES)]
    more = f" and {len(counts) - _MOST_NAMES} more" if len(counts) > _MOST_NAMES else ""
    return OtherModels(True, f"answers name several models, {', '.join(names)}{more}, but {requested}")
