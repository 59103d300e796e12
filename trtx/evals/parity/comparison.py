"""Compares one pass with the reference, request by request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trtx.bench.named_models import other_models
from trtx.evals.parity.distance import Distance, distance
from trtx.evals.parity.forms import ComparedRoute, Divergence, ParityAnswer, PassComparison, RouteEvidence, Worst
from trtx.evals.statistics import mean_interval
from trtx.stats.intervals import CONFIDENCE


def compare_route(
    route: str,
    reference: Sequence[ParityAnswer],
    answers: Sequence[ParityAnswer],
    *,
    model: str,
    cancelled: int,
    evidence: RouteEvidence,
    confidence: float = CONFIDENCE,
) -> ComparedRoute:
    """Compares ``answers`` of ``model`` with ``reference`` answers to the same prompts.

    Requests without a complete answer on either side are reported but not compared.
    """
    expected = {one.index: one for one in reference if one.failure is None}
    failures = tuple(f"request {one.index}: {one.failure}" for one in answers if one.failure is not None)
    pairs = [(expected[one.index], one) for one in answers if one.failure is None and one.index in expected]
    others = other_models(model, (one.models for one in answers))
    return ComparedRoute(route, len(answers), failures, cancelled, evidence, _compared(pairs, confidence), others)


def _compared(pairs: Sequence[tuple[ParityAnswer, ParityAnswer]], confidence: float) -> PassComparison:
    found = {before.index: (before, now, distance(before, now)) for before, now in pairs}
    distances = {index: one for index, (_, _, one) in found.items()}
    means = [one.mean for one in distances.values()]
    divergences = [
        Divergence(index, one.divergence, _at(one, one.divergence), *_tokens(before, now, one.divergence))
        for index, (before, now, one) in found.items()
        if one.divergence is not None
    ]
    return PassComparison(
        requests=len(pairs),
        identical=len(pairs) - len(divergences),
        divergences=tuple(sorted(divergences, key=lambda one: -one.distance)),
        answer_positions=sum(len(one.answer) for one in distances.values()),
        prompt_positions=sum(len(one.prompt) for one in distances.values()),
        worst=_worst(distances),
        mean=mean_interval(means, confidence),
        mean_distance=sum(means) / len(means) if means else 0.0,
    )


def _at(found: Distance, position: int) -> float:
    return found.answer[position] if position < len(found.answer) else 0.0


def _tokens(before: ParityAnswer, now: ParityAnswer, position: int) -> tuple[int, int]:
    """The tokens at a position; -1 after an answer's end."""
    return tuple(one.token_ids[position] if position < len(one.token_ids) else -1 for one in (before, now))  # type: ignore[return-value]


def _worst(distances: Mapping[int, Distance]) -> tuple[Worst, ...]:
    """The first maximum of each request's distances, in descending order."""
    found: list[Worst] = []
    for index, one in distances.items():
        parts = [
            *(Worst(index, "prompt", position, value) for position, value in enumerate(one.prompt, start=1)),
            *(Worst(index, "answer", position, value) for position, value in enumerate(one.answer)),
        ]
        found += [max(parts, key=lambda part: part.distance)] if parts else []
    return tuple(sorted(found, key=lambda part: -part.distance))
