"""Log-probabilities of a prompt, in the ways that servers give them.

``engine_data``: ``prompt_logprobs`` with ``nvext.extra_fields``, which Dynamo hands on from its workers. ``echo``:
OpenAI's completions, as vLLM and others still serve them. A way is what :func:`find_route` saw work.
:class:`InChoice` is asked by fidelity alone, which needs token ids: an echo has texts of tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from trtx.evals.session.client import Client, Question, Refused

_ABOVE_ZERO = 1e-3  # of a logarithm of a probability, by rounding: in bfloat16, of one near 0, much less
_ABOVE_ONE = 0.05  # of a sum of probabilities, by rounding each logarithm to bfloat16
_ALTERNATIVES = 1  # beside the prompt's own token: the likeliest, which says whether that one is greedy


@dataclass(frozen=True, slots=True)
class Scored:
    """The scored tokens of one prompt: the sum of their natural log-probabilities; whether each was the likeliest."""

    logprob: float
    is_greedy: bool


class PromptLogprobs(Protocol):
    """A way to get them."""

    name: str

    def question(self, ids: list[int]) -> Question: ...

    def scored(self, answer: dict[str, Any], ids: list[int], count: int) -> Scored | Refused:
        """Of the last ``count`` tokens of ``ids``."""
        ...


class EngineData:
    name = "engine_data"

    def question(self, ids: list[int], alternatives: int = _ALTERNATIVES) -> Question:
        """``alternatives``: how many of the likeliest tokens of each position are asked for beside the prompt's own."""
        return Question(
            "completions",
            {
                "prompt": ids,
                "max_tokens": 1,
                "temperature": 0.0,
                "prompt_logprobs": alternatives,
                "nvext": {"extra_fields": ["engine_data"]},
            },
        )

    def rows(self, answer: dict[str, Any], ids: list[int], count: int) -> list[dict[int, float]] | Refused:
        """Natural log-probabilities by token id, of the last ``count`` positions of ``ids``, its own among them."""
        try:
            return _rows(answer["nvext"]["engine_data"]["prompt_logprobs"], ids, count)
        except (KeyError, TypeError, ValueError, AttributeError):
            return Refused("the answer has no nvext.engine_data.prompt_logprobs that can be read")

    def scored(self, answer: dict[str, Any], ids: list[int], count: int) -> Scored | Refused:
        entries = self.rows(answer, ids, count)
        if isinstance(entries, Refused):
            return entries
        own = [row[token] for token, row in zip(ids[-count:], entries, strict=True)]
        return _scored(own, [max(row.values()) for row in entries])


class InChoice:
    """As vLLM's completions show them (``CompletionResponseChoice`` of its entrypoints/openai), beside the text."""

    name = "prompt_logprobs"

    def question(self, ids: list[int], alternatives: int = _ALTERNATIVES) -> Question:
        """As :meth:`EngineData.question`."""
        return Question(
            "completions", {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": alternatives}
        )

    def rows(self, answer: dict[str, Any], ids: list[int], count: int) -> list[dict[int, float]] | Refused:
        """As :meth:`EngineData.rows`."""
        try:
            return _rows(answer["choices"][0]["prompt_logprobs"], ids, count)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            return Refused("the answer's choice has no prompt_logprobs that can be read")


def _rows(told: list[Any], ids: list[int], count: int) -> list[dict[int, float]] | Refused:
    """Raises KeyError, TypeError, ValueError or AttributeError for what is none."""
    found = [{int(token): float(entry["logprob"]) for token, entry in row.items()} for row in told[-count:]]
    if len(found) != count or any(token not in row for token, row in zip(ids[-count:], found, strict=True)):
        return Refused(f"prompt_logprobs do not cover the last {count} tokens of the prompt")
    if (problem := _problem([value for row in found for value in row.values()])) is not None:
        return Refused(problem)
    if (most := max(math.fsum(map(math.exp, row.values())) for row in found)) > 1 + _ABOVE_ONE:
        return Refused(f"the probabilities of a position of the prompt sum to {most:.4g}; expected 1 at most")
    return found


def _problem(logprobs: list[float]) -> str | None:
    """Why these are no logarithms of probabilities."""
    if not all(map(math.isfinite, logprobs)):
        return "a log-probability of the prompt is not a finite number"
    if (most := max(logprobs, default=0.0)) > _ABOVE_ZERO:
        return f"a log-probability of the prompt is {most:.4g}; expected 0 at most"
    return None


class Echo:
    name = "echo"

    def question(self, ids: list[int]) -> Question:
        return Question(
            "completions", {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "logprobs": _ALTERNATIVES, "echo": True}
        )

    def scored(self, answer: dict[str, Any], ids: list[int], count: int) -> Scored | Refused:
        try:
            (choice,) = answer["choices"]
            told = choice["logprobs"]
            read = len(told["token_logprobs"])
            # The prompt's tokens, and after them the one that was made.
            own = [float(value) for value in told["token_logprobs"][len(ids) - count : len(ids)]]
            tops = [max(map(float, row.values())) for row in told["top_logprobs"][len(ids) - count : len(ids)]]
        except (KeyError, TypeError, ValueError, AttributeError):
            return Refused("the answer has no logprobs of its prompt that can be read")
        if (
            read > len(ids) + 1
        ):  # it put tokens before those that were sent, or cut the prompt into others: all are moved
            return Refused(f"the answer has logprobs of {read} tokens, and {len(ids)} were sent and one made")
        if len(own) != count or len(tops) != count:
            return Refused(f"the answer's logprobs do not cover the last {count} tokens of the prompt")
        return _scored(own, tops)


def _scored(own: list[float], likeliest: list[float]) -> Scored | Refused:
    if (problem := _problem([*own, *likeliest])) is not None:
        return Refused(problem)
    return Scored(math.fsum(own), all(one >= top for one, top in zip(own, likeliest, strict=True)))


async def find_route(client: Client, ids: list[int]) -> PromptLogprobs | str:
    """The first way that covers the prompt ``ids``, or what the server said to each."""
    said = []
    for route in (EngineData(), Echo()):
        answer = await client.ask(route.question(ids))
        found = answer if isinstance(answer, Refused) else route.scored(answer, ids, len(ids) - 1)
        if isinstance(found, Scored):
            return route
        said.append(f"asked with {route.name}: {found.reason}")
    return "; ".join(said)
