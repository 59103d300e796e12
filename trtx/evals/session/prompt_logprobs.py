"""Log-probabilities of a prompt, in the ways in which different servers return them.

``engine_data``: ``prompt_logprobs`` with ``nvext.extra_fields``, which Dynamo passes on from its workers. ``echo``:
OpenAI's completions API, as vLLM and others still support it. :func:`find_route` determines which one works. Only
fidelity uses :class:`InChoice`, because it needs token ids, while an echo has the text of tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from trtx.evals.session.client import Client, ServerRefusal, ServerRequest

# Rounding error permitted for a log-probability; in bfloat16, values near 0 have much smaller errors.
_ABOVE_ZERO = 1e-3
_ABOVE_ONE = 0.05  # rounding error of a sum of probabilities whose logarithms are bfloat16
_ALTERNATIVES = 1  # in addition to the prompt's own token: the most likely one, to check for greediness


@dataclass(frozen=True, slots=True)
class PromptScore:
    """Scored tokens of one prompt: the sum of their natural log-probabilities, and whether each was the most likely
    one.
    """

    logprob: float
    is_greedy: bool


class PromptLogprobs(Protocol):
    """A way to request prompt log-probabilities."""

    name: str

    def question(self, ids: list[int]) -> ServerRequest: ...

    def scored(self, answer: dict[str, Any], ids: list[int], count: int) -> PromptScore | ServerRefusal:
        """Scores the last ``count`` tokens of ``ids`` from their log-probabilities in ``answer``."""
        ...


class EngineData:
    name = "engine_data"

    def question(self, ids: list[int], alternatives: int = _ALTERNATIVES) -> ServerRequest:
        """``alternatives``: number of most likely tokens to request per position, in addition to the prompt's own."""
        return ServerRequest(
            "completions",
            {
                "prompt": ids,
                "max_tokens": 1,
                "temperature": 0.0,
                "prompt_logprobs": alternatives,
                "nvext": {"extra_fields": ["engine_data"]},
            },
        )

    def rows(self, answer: dict[str, Any], ids: list[int], count: int) -> list[dict[int, float]] | ServerRefusal:
        """Natural log-probabilities by token id for the last ``count`` positions of ``ids``, including the own
        tokens.
        """
        try:
            return _rows(answer["nvext"]["engine_data"]["prompt_logprobs"], ids, count)
        except (KeyError, TypeError, ValueError, AttributeError):
            return ServerRefusal("the answer has no nvext.engine_data.prompt_logprobs that can be read")

    def scored(self, answer: dict[str, Any], ids: list[int], count: int) -> PromptScore | ServerRefusal:
        entries = self.rows(answer, ids, count)
        if isinstance(entries, ServerRefusal):
            return entries
        own = [row[token] for token, row in zip(ids[-count:], entries, strict=True)]
        return _scored(own, [max(row.values()) for row in entries])


class InChoice:
    """vLLM's form in completions (``CompletionResponseChoice`` in its entrypoints/openai), next to the text."""

    name = "prompt_logprobs"

    def question(self, ids: list[int], alternatives: int = _ALTERNATIVES) -> ServerRequest:
        """The request for log-probabilities of ``ids``, as :meth:`EngineData.question`."""
        return ServerRequest(
            "completions", {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": alternatives}
        )

    def rows(self, answer: dict[str, Any], ids: list[int], count: int) -> list[dict[int, float]] | ServerRefusal:
        """Log-probabilities from the answer's first choice, in the form that :meth:`EngineData.rows` returns."""
        try:
            return _rows(answer["choices"][0]["prompt_logprobs"], ids, count)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            return ServerRefusal("the answer's choice has no prompt_logprobs that can be read")


def _rows(told: list[Any], ids: list[int], count: int) -> list[dict[int, float]] | ServerRefusal:
    """Parses rows. Raises KeyError, TypeError, ValueError or AttributeError for malformed ones."""
    found = [{int(token): float(entry["logprob"]) for token, entry in row.items()} for row in told[-count:]]
    if len(found) != count or any(token not in row for token, row in zip(ids[-count:], found, strict=True)):
        return ServerRefusal(f"prompt_logprobs do not cover the last {count} tokens of the prompt")
    if (problem := _problem([value for row in found for value in row.values()])) is not None:
        return ServerRefusal(problem)
    if (most := max(math.fsum(map(math.exp, row.values())) for row in found)) > 1 + _ABOVE_ONE:
        return ServerRefusal(f"the probabilities of a position of the prompt sum to {most:.4g}; expected 1 at most")
    return found


def _problem(logprobs: list[float]) -> str | None:
    """Returns why the values can't be log-probabilities; None if they can."""
    if not all(map(math.isfinite, logprobs)):
        return "a log-probability of the prompt is not a finite number"
    if (most := max(logprobs, default=0.0)) > _ABOVE_ZERO:
        return f"a log-probability of the prompt is {most:.4g}; expected 0 at most"
    return None


class Echo:
    name = "echo"

    def question(self, ids: list[int]) -> ServerRequest:
        return ServerRequest(
            "completions", {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "logprobs": _ALTERNATIVES, "echo": True}
        )

    def scored(self, answer: dict[str, Any], ids: list[int], count: int) -> PromptScore | ServerRefusal:
        try:
            (choice,) = answer["choices"]
            told = choice["logprobs"]
            read = len(told["token_logprobs"])
            # The prompt's tokens are followed by the generated one.
            own = [float(value) for value in told["token_logprobs"][len(ids) - count : len(ids)]]
            tops = [max(map(float, row.values())) for row in told["top_logprobs"][len(ids) - count : len(ids)]]
        except (KeyError, TypeError, ValueError, AttributeError):
            return ServerRefusal("the answer has no logprobs of its prompt that can be read")
        if read > len(ids) + 1:  # the server added tokens or tokenized the prompt differently, so positions don't match
            return ServerRefusal(f"the answer has logprobs of {read} tokens, and {len(ids)} were sent and one made")
        if len(own) != count or len(tops) != count:
            return ServerRefusal(f"the answer's logprobs do not cover the last {count} tokens of the prompt")
        return _scored(own, tops)


def _scored(own: list[float], likeliest: list[float]) -> PromptScore | ServerRefusal:
    if (problem := _problem([*own, *likeliest])) is not None:
        return ServerRefusal(problem)
    return PromptScore(math.fsum(own), all(one >= top for one, top in zip(own, likeliest, strict=True)))


async def find_route(client: Client, ids: list[int]) -> PromptLogprobs | str:
    """The first route that covers the prompt ``ids``, else the server's refusals."""
    sentences = []
    for route in (EngineData(), Echo()):
        answer = await client.ask(route.question(ids))
        found = answer if isinstance(answer, ServerRefusal) else route.scored(answer, ids, len(ids) - 1)
        if isinstance(found, PromptScore):
            return route
        sentences.append(f"asked with {route.name}: {found.reason}")
    return "; ".join(sentences)
