"""How long the texts are that a regular expression requires, read from its counted repetitions."""

from __future__ import annotations

import re

_COUNT = re.compile(r"\{(\d+)(?:,\d*)?\}")
_BRACED = re.compile(r"[pPxuU]\{[^}]*\}")  # after a backslash: one character
_GROUP_HEAD = re.compile(r"\?(?:P?<\w+>|[a-zA-Z-]*:|[=!]|<[=!])")
_MOST_DIGITS = 12


def required_length(pattern: str) -> int:
    """Returns the least number of characters of a match of ``pattern``. Of alternatives, the longest one counts.

    The result is an estimate, for a limit: ``pattern`` may be invalid, and look-around counts like a group.
    """
    outer: list[tuple[int, int]] = []  # of each open group: the longest alternative, and the length before the group
    longest = length = last = at = 0  # last: the length of the item that a repetition would repeat
    while at < len(pattern):
        character = pattern[at]
        count = _COUNT.match(pattern, at)
        step, item = 1, 0
        if count is not None:
            number = int(count[1]) if len(count[1]) <= _MOST_DIGITS else 10**_MOST_DIGITS
            length, last = length + last * (number - 1), last * number
            at = count.end()
            continue
        if character in "*?":
            length, last = length - last, 0
        elif character == "(":
            outer.append((longest, length))
            longest = length = last = 0
            head = _GROUP_HEAD.match(pattern, at + 1)
            step = 1 if head is None else 1 + len(head[0])
        elif character == ")" and outer:
            last = max(longest, length)
            longest, length = outer.pop()
            length += last
        elif character == "|":
            longest, length, last = max(longest, length), 0, 0
        elif character == "[":
            step, item = _class_end(pattern, at) - at, 1
        elif character == "\\":
            braced = _BRACED.match(pattern, at + 1)
            step, item = 2 if braced is None else 1 + len(braced[0]), 1
        elif character not in "+^$":
            item = 1
        if item:
            length, last = length + item, item
        at += step
    return max(longest, length, *(before for _, before in outer), 0)


def _class_end(pattern: str, at: int) -> int:
    """The index after a class in brackets that begins at ``at``; classes may be nested."""
    depth = 0
    first = at
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "[":
            depth += 1
            first = at
        elif pattern[at] == "]" and pattern[first + 1 : at] not in ("", "^"):
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    return len(pattern)
