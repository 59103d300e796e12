"""The prompts of ``needle``: a fact at a certain depth of a haystack and a question about it, with a given token
length.

There are two haystacks. ``prose``: sentences without numbers, plus one with a number (the passkey of Mohtashami and
Jaggi 2023, over lengths and depths as in Kamradt's needle in a haystack). ``look-up``: a list of "name is number", a
task for which ``synthetic:tiny-trained`` was trained (``trtx/checkpoint/tasks.py``).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any, Literal

from trtx.checkpoint.text import NOUNS
from trtx.errors import UsageError
from trtx.evals.forms import Retrieval, Sample
from trtx.evals.messages import NeedleAsked
from trtx.evals.statistics import share_interval

TASK = "needle"
METRIC = "acc"
ANSWER_TOKENS = 32  # tokens reserved for an answer; included in a length, as in RULER
Haystack = Literal["prose", "look-up"]

_PROBE_UNITS = 32  # size of the first probe when fitting a length
_SHORTEST: dict[Haystack, int] = {"prose": 512, "look-up": 64}  # smallest default length
_OPENING = "A special number is hidden in the text below. Remember it: the question at the end asks for it.\n\n"
_PLACES = ("behind", "beside", "in front of", "above", "below", "far from", "close to", "between the trees and")
_ACTIONS = (
    "stood",
    "waited",
    "was seen",
    "could be found",
    "had always been",
    "was left",
    "lay hidden",
    "came to rest",
)
_TIMES = ("in the morning", "before the rain", "that summer", "at the end of the day", "as everybody knew", "once more")


def rows(
    asked: NeedleAsked, haystack: Haystack, tokens_of: Callable[[str], int], context_length: int | None
) -> list[dict[str, Any]]:
    """The documents of the task: one sample of every length and depth, then a second of each, and so on.

    ``tokens_of`` counts a prompt's tokens as the server does. ``context_length``: tokens of prompt and answer; None:
    unknown. Raises UsageError for a length that exceeds it, or that is too short for the question.
    """
    lengths = asked.lengths or _lengths(haystack, context_length)
    if context_length is not None and (too_long := next((one for one in lengths if one > context_length), None)):
        raise UsageError(f"--needle-lengths {too_long} exceeds the context length of {context_length} tokens")
    return [
        _row(haystack, length, depth, number, tokens_of)
        for number in range(asked.samples)
        for length in lengths
        for depth in asked.depths
    ]


def prompt(row: dict[str, Any]) -> str:
    """The complete prompt of a document."""
    draw = random.Random(f"{row['seed']}/haystack")
    of_haystack = _entries(draw, row["key"]) if row["haystack"] == "look-up" else _sentences(draw)
    hay = list(islice(of_haystack, row["before"] + row["after"]))
    if row["haystack"] == "look-up":
        entries = [*hay[: row["before"]], f"{row['key']} is {row['answer']}", *hay[row["before"] :]]
        return f"{', '.join(entries)}. What is {row['key']}?"
    needle = f"The special number of the {row['key']} is {row['answer']}."
    text = " ".join([*hay[: row["before"]], needle, *hay[row["before"] :]])
    question = f"What is the special number of the {row['key']}? Answer with the number alone."
    return f"{_OPENING}{text}\n\nQuestion: {question}\nAnswer:"


def is_retrieved(row: dict[str, Any], answer: str) -> bool:
    """Whether an answer has the number: anywhere in it for prose, as its first line for a look-up."""
    if row["haystack"] == "look-up":
        return bool(answer.strip().split("\n")[0].strip() == row["answer"])
    return row["answer"] in re.findall(r"\d+", answer.replace(",", ""))


def retrievals(documents: Sequence[dict[str, Any]], samples: Sequence[Sample]) -> tuple[Retrieval, ...]:
    """Results by length, then depth. ``documents``: all that should be asked; ``samples``: those with an answer."""
    found = []
    for length in dict.fromkeys(row["length"] for row in documents):
        for depth in dict.fromkeys(row["depth"] for row in documents):
            own = [row for row in documents if (row["length"], row["depth"]) == (length, depth)]
            tokens = [row["prompt_tokens"] for row in own]
            values = [
                judged.metrics[METRIC]
                for sample in samples if (sample.doc["length"], sample.doc["depth"]) == (length, depth)
                for judged in sample.judgements if METRIC in judged.metrics
            ]  # fmt: skip
            found.append(
                Retrieval(length, depth, min(tokens, default=None), max(tokens, default=None), len(own), len(values),
                          share_interval(values))
            )  # fmt: skip
    return tuple(found)


def most_that_fit(tokens_of: Callable[[int], int], room: int) -> tuple[int, int] | None:
    """The largest count of units whose tokens fit into ``room``, to within an average unit, and its number of tokens.

    None if even zero units exceed ``room``. ``tokens_of`` must increase roughly linearly with the count. It is slow for
    a long text, so few counts are tried.
    """
    low, of_low, high = 0, tokens_of(0), None
    if of_low > room:
        return None
    guess, each, of_none = _PROBE_UNITS, 1.0, of_low
    while room - of_low >= each and (high is None or high - low > 1):
        guess = guess if high is None else min(guess, high - 1)
        tokens = tokens_of(guess)
        each = max(1.0, (tokens - of_none) / guess)
        if tokens <= room:
            low, of_low = guess, tokens
        else:
            high = guess
        guess = low + max(1, int((room - of_low) / each))
    return low, of_low


def _lengths(haystack: Haystack, context_length: int | None) -> tuple[int, ...]:
    """Powers of two below the context length, and the context length itself."""
    if context_length is None:
        raise UsageError(
            "task needle: the server does not report its context length; give lengths with --needle-lengths"
        )
    powers = (1 << exponent for exponent in range(_SHORTEST[haystack].bit_length() - 1, context_length.bit_length()))
    return (*(length for length in powers if length < context_length), context_length)


def _row(haystack: Haystack, length: int, depth: int, number: int, tokens_of: Callable[[str], int]) -> dict[str, Any]:
    seed = f"{length}/{depth}/{number}"
    draw = random.Random(f"{seed}/needle")
    key = draw.choice(NOUNS)
    answer = str(draw.randint(0, 99) if haystack == "look-up" else draw.randint(1_000_000, 9_999_999))

    def of_size(count: int) -> dict[str, Any]:
        before = round(count * depth / 100)
        return {
            "haystack": haystack, "seed": seed, "length": length, "depth": depth, "before": before,
            "after": count - before, "key": key, "answer": answer,
        }  # fmt: skip

    found = most_that_fit(lambda units: tokens_of(prompt(of_size(units))), length - ANSWER_TOKENS)
    if found is None:
        least = tokens_of(prompt(of_size(0))) + ANSWER_TOKENS
        raise UsageError(
            f"--needle-lengths {length}: the question and its answer alone take {least} tokens; expected more than that"
        )
    count, tokens = found
    return {**of_size(count), "prompt_tokens": tokens}


def _entries(draw: random.Random, key: str) -> Iterator[str]:
    """Entries in which no name repeats before all have been used, and that never contain the requested one."""
    names = [name for name in dict.fromkeys(NOUNS) if name != key]
    draw.shuffle(names)
    for name in cycle(names):
        yield f"{name} is {draw.randint(0, 99)}"


def _sentences(draw: random.Random) -> Iterator[str]:
    while True:
        first, second = draw.choice(NOUNS), draw.choice(NOUNS)
        action, place, time = draw.choice(_ACTIONS), draw.choice(_PLACES), draw.choice(_TIMES)
        yield f"The {first} {action} {place} the {second} {time}."
