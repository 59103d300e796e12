"""Checks values of a record that aiperf 0.13.0's models accept but that a server or a load can't use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trtx.bench.answer_formats import WrongFormat, requested_format
from trtx.bench.body_ranges import RANGES
from trtx.bench.datasets.messages import check_messages
from trtx.bench.datasets.wrong_record import WrongRecord
from trtx.bench.owned_fields import OWNED_FIELDS
from trtx.config.wording import quoted

_MAX_LENGTH = 10_000_000  # tokens; the same limit as for a load's lengths
_MEDIA = ("image", "audio", "video")
_NUMBERS = ("output_length", "input_length", "timestamp", "delay")
BLOCK_TOKENS = 512
"""Tokens per entry of a trace's ``hash_ids``: ``default_block_size`` of mooncake_trace in aiperf's plugins."""


def check_values(turn: Any, of: str, *, is_scheduled: bool, block_tokens: int | None) -> None:
    """Checks a turn that aiperf's model has parsed. Raises WrongRecord.

    ``block_tokens``: tokens per entry of ``hash_ids``; None: unknown, so not checked.
    """
    for name in ("output_length", "input_length"):
        length = getattr(turn, name, None)
        if length is not None and not 1 <= length <= _MAX_LENGTH:
            raise WrongRecord(f"{of}{name} is {length}; expected from 1 to {_MAX_LENGTH:,} tokens")
    for name in ("timestamp", "delay"):
        time = getattr(turn, name, None)
        if time is not None and not (math.isfinite(time) and time >= 0):
            raise WrongRecord(f"{of}{name} is {time}; expected milliseconds, 0 or more")
    if is_scheduled and turn.timestamp is None:
        raise WrongRecord(f"{of}timestamp is missing, but fixed_schedule sends each request at its timestamp; add it")
    if getattr(turn, "payload", None) is not None:
        raise WrongRecord(
            f"{of}payload is a complete request body, which aiperf would send without the load's settings; write its "
            "messages as messages, its max_tokens as output_length, and its other fields as extra"
        )
    _check_blocks(turn, of, block_tokens)
    check_messages(getattr(turn, "messages", None) or (), of)
    _check_extra(getattr(turn, "extra", None) or {}, of)
    try:
        requested_format(body_of(turn))
    except WrongFormat as error:
        raise WrongRecord(f"{of}{error}") from error
    for kind in _MEDIA:
        for content in (getattr(turn, kind, None), *(getattr(turn, f"{kind}s", None) or ())):
            _check_media(content, f"{of}{kind}", kind)


def refuse_booleans(value: Mapping[str, Any], of: str = "") -> None:
    """Raises WrongRecord if a numeric field is true or false, which aiperf's models accept as 1 and 0."""
    for name in _NUMBERS:
        if isinstance(value.get(name), bool):
            raise WrongRecord(f"{of}{name} is {str(value[name]).lower()}; expected a number")
    for number, turn in enumerate(value.get("turns") or ()):
        if isinstance(turn, dict):
            refuse_booleans(turn, f"turns[{number}].")


def body_of(turn: Any) -> dict[str, Any]:
    """The fields that a turn adds to the body of its request, besides its messages."""
    tools = getattr(turn, "tools", None)
    return {**({"tools": tools} if tools else {}), **(getattr(turn, "extra", None) or {})}


def numbers_of(turn: Any) -> Iterator[tuple[str, float]]:
    """Yields name and value of the request body's fields whose range a server may limit."""
    for name, value in (getattr(turn, "extra", None) or {}).items():
        if name in RANGES and value is not None:
            yield name, value


def _check_blocks(turn: Any, of: str, block_tokens: int | None) -> None:
    ids, length = getattr(turn, "hash_ids", None), getattr(turn, "input_length", None)
    if ids and length is not None and block_tokens is not None and (len(ids) - 1) * block_tokens >= length:
        raise WrongRecord(
            f"{of}hash_ids has {len(ids)} blocks of {block_tokens} tokens, but input_length is {length}; expected at "
            f"most {math.ceil(length / block_tokens)} blocks, or another block size with --aiperf-args "
            "'--isl-block-size N'"
        )


def _check_extra(extra: Mapping[str, Any], of: str) -> None:
    inner = extra.get("nvext")
    for prefix, fields in (("extra.", extra), ("extra.nvext.", inner if isinstance(inner, dict) else {})):
        for name in fields:
            if name in OWNED_FIELDS:
                instead = "output_length" if name in ("max_tokens", "max_completion_tokens") else OWNED_FIELDS[name]
                do = f"set {instead} instead" if instead else "leave it out"
                raise WrongRecord(f"{of}{prefix}{name} is set by trtx, because it would change what is measured; {do}")
    for name, value in extra.items():
        if name in RANGES and value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise WrongRecord(f"{of}{name} is {quoted(value)}; expected {RANGES[name]}")


def _check_media(content: Any, name: str, kind: str) -> None:
    for one in getattr(content, "contents", [content]):
        if not isinstance(one, str) or not one or "://" in one or one.startswith("data:"):
            continue
        if kind == "audio" and one.partition(",")[0].lower() in ("wav", "mp3"):
            continue
        if not Path(one).is_file():
            raise WrongRecord(
                f"{name} is {quoted(one)}, and there is no such file; expected a file, an address or a data: URL"
            )
