"""Which model answers say that they are of, held against the one that was asked for. Pure.

An answer without a name proves nothing. Another name throughout may be an alias that a gateway resolved, or another
model: no client can tell, so it is told. Several names are several models, whichever of them was meant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from trtx.bench.answers import model_name
from trtx.config.wording import quoted

_LONGEST = 60  # characters of a name in a sentence
_TOLD = 3  # names in one


@dataclass(frozen=True, slots=True)
class OtherModels:
    """Answers that name others than the model that was asked for."""

    are_several: bool
    sentence: str  # short, without its full stop


def other_models(asked: str, answers: Iterable[Iterable[str]]) -> OtherModels | None:
    """``answers``: the names in each. None where none of them names another."""
    counts = Counter(name for names in answers for name in dict.fromkeys(names))
    if counts.keys() <= {model_name(asked)}:
        return None
    was_asked = f"{quoted(asked, _LONGEST)} was asked"
    if len(counts) == 1:
        return OtherModels(False, f"answers say that {quoted(next(iter(counts)), _LONGEST)} gave them, and {was_asked}")
    told = [f"{quoted(name, _LONGEST)} ({count})" for name, count in counts.most_common(_TOLD)]
    more = f" and {len(counts) - _TOLD} more" if len(counts) > _TOLD else ""
    return OtherModels(True, f"answers say that several models gave them, {', '.join(told)}{more}, and {was_asked}")
