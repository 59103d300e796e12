"""Turns aiperf's error records into a few short failure reasons with counts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from trtx.bench.answers import words

INCOMPLETE = "IncompleteAnswer"  # error type of trtx's endpoint, whose message is a complete reason

# aiperf 0.13.0 stores an exception as its repr, and an event that it took for an error as the repr of its own object.
_REPR = re.compile(r"\w+\((['\"])(.*)\1\)", re.DOTALL)
_EVENT_DATA = re.compile(r"name=\\*'data\\*', value=\\*(['\"])(.*?)\\*\1\)", re.DOTALL)
_EVENT = "Error occurred in SSE response: "
# Parts of a message that differ between requests with the same reason: ids, addresses, times.
_OWN = re.compile(r"\b(?=[0-9a-f-]*\d)[0-9a-f-]{8,}\b|\b\d{4,}\b")
_MOST = 20  # maximum number of distinct reasons
_OTHERS = "other reasons"

Reasons = tuple[tuple[str, int], ...]


def reason(error: Mapping[str, Any]) -> str:
    """aiperf's ErrorDetails as one short line: the status and the server's message, or the exception."""
    kind, message, code = str(error.get("type") or ""), str(error.get("message") or ""), error.get("code")
    if kind == INCOMPLETE:
        return message
    if whole := _REPR.fullmatch(message):
        message = whole.group(2)
    if _EVENT in message:
        message = message.partition(_EVENT)[2]
        if data := _EVENT_DATA.search(message):
            message = data.group(2)
        return f"error in the answer: {words(message)}"
    if kind == "InvalidInferenceResultError":  # an empty body, or one in which aiperf finds no content
        return "empty answer"
    text = "" if message == f"{kind}()" else words(message)
    if "Timeout" in kind:
        return f"timed out: {text or kind}"
    if code:
        return f"HTTP {code} {text.removeprefix(f'{code} ') or kind}"
    return f"{kind}: {text}" if text else kind or "an error without a message"


def count_reasons(reasons: Iterable[str]) -> Reasons:
    """Each distinct reason with its count, most frequent first. Reasons that differ only in ids or addresses are
    merged.
    """
    return merge_reasons([[(text, 1) for text in reasons]])


def merge_reasons(parts: Iterable[Iterable[tuple[str, int]]]) -> Reasons:
    """Merges the reasons of several parts. Reasons beyond the 20 most frequent become one last entry."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    others = 0
    for text, count in (entry for part in parts for entry in part):
        if text == _OTHERS:
            others += count
            continue
        key = _OWN.sub("#", text)
        first.setdefault(key, text)
        counts[key] += count
    ordered = [(first[key], count) for key, count in counts.most_common()]
    others += sum(count for _, count in ordered[_MOST:])
    return (*ordered[:_MOST], *([(_OTHERS, others)] if others else []))


def describe(reasons: Reasons, most: int = _MOST) -> str:
    """The most frequent reasons as one clause, with counts if there are several."""
    if len(reasons) == 1:
        return reasons[0][0]
    shown = [f"{count} × {text}" for text, count in reasons[:most]]
    if rest := sum(count for _, count in reasons[most:]):
        shown.append(f"{rest} × {_OTHERS}")
    return "; ".join(shown)
