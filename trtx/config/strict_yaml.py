"""The one reader of YAML. What stands in a file is read as it stands, or refused with its line.

A reader that lets the last of two equal keys win, follows an alias into itself or makes a date of ``2001-01-01`` gives
answers that nobody wrote. Bounded are the size of a file, the levels of it and the values in it, aliases counted as
often as they are used: a few lines of YAML can stand for billions of values.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import yaml
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from trtx.config.files import read_text
from trtx.config.wording import quoted, shown
from trtx.errors import UsageError

MAX_LEVELS = 32
"""TensorRT-LLM's own arguments have five."""
MAX_VALUES = 100_000
"""Of a document, aliases spelled out: an expert placement of 60 layers with 320 slots has 20,000."""
_INTEGERS = range(-(2**63), 2**64)  # what JSON's readers, C++ and TensorRT-LLM can hold
_LONGEST_NUMBER = 400  # characters; int() is quadratic, and refuses more than 4,300 digits

_CORE = "tag:yaml.org,2002:"
_MERGE = f"{_CORE}merge"
_SCALARS = ("str", "int", "float", "bool", "null")
_NAMED = ("str", "int", "float", "bool")  # !!null would drop what stands after it
# YAML 1.1 as PyYAML reads it: 12:30 is 750, and 010 is 8. Nobody who writes a config means that.
_OTHER_BASE = re.compile(r"[-+]?(?:0[0-7_]+|[0-9_.]+(?::[0-9_.]+)+)")
_DATE = f"{_CORE}timestamp"
# Of such text libyaml makes PyYAML's own events, in a tenth of the time. Not of text with tabs, tags, block scalars,
# complex keys, byte order marks and control characters: each takes some of them that the other refuses or reads apart.
_READ_ALIKE = re.compile(r"[\n \"-=@-{}~]*")
_LIBYAML: Any = getattr(yaml, "CSafeLoader", None)  # which PyYAML may be installed without


def read_yaml(path: Path, what: str, expected: str) -> Any:
    """The document in ``path``; None for an empty one. ``what`` names the file's kind, ``expected`` what it shall hold.

    Raises UsageError: what the file is, its line, what is wrong, what to do.
    """
    return parse_yaml(read_text(path, what, expected), f"{what} {shown(path)}")


def parse_yaml(text: str, source: str, *, is_file: bool = True) -> Any:
    """The one document of ``text``: dicts, lists, text, finite numbers, booleans and None; keys are text or integers.

    ``source`` begins the message of the UsageError, with the line where ``is_file`` holds.
    """
    if _LIBYAML is not None and _READ_ALIKE.fullmatch(text):
        with contextlib.suppress(UsageError):  # told below, in PyYAML's words
            return _Reader(text, source, is_file, _LIBYAML).read()
    return _Reader(text, source, is_file, yaml.SafeLoader).read()


class _Reader:
    """Builds values out of PyYAML's events. Its own composer recurses without bound and forgets equal keys."""

    def __init__(self, text: str, source: str, is_file: bool, loader: Any) -> None:
        self._source, self._is_file, self._text, self._loader = source, is_file, text, loader
        self._events: Iterator[yaml.Event] = iter(())
        self._resolver, self._constructor = Resolver(), SafeConstructor()
        # name -> value and how many values it stands for; None while it is still being read
        self._anchors: dict[str, tuple[Any, int] | None] = {}
        self._count = 0

    def read(self) -> Any:
        try:
            self._events = iter(yaml.parse(self._text, Loader=self._loader))
            next(self._events)  # the stream's start
            if isinstance(next(self._events), yaml.StreamEndEvent):
                return None
            value = self._value(next(self._events), 1)
            next(self._events)  # the document's end
            after = next(self._events)
            if not isinstance(after, yaml.StreamEndEvent):
                self._refuse(after, "a second document begins; expected one")
            return value
        except yaml.MarkedYAMLError as error:
            problem = " ".join(part for part in (error.context, error.problem) if part)
            mark = error.problem_mark or error.context_mark
            self._refuse_line(mark.line if mark else 0, f"this is not YAML ({shown(problem, 200)}); mend it")
        except yaml.reader.ReaderError as error:
            line = self._text.count("\n", 0, error.position)
            self._refuse_line(line, "a character that no YAML may hold; leave it out")

    def _value(self, event: yaml.Event, level: int) -> Any:
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        self._counted(event, 1)
        before = self._count - 1
        anchor = getattr(event, "anchor", None)
        if anchor is not None:
            if anchor in self._anchors:
                self._refuse(event, f"the anchor &{shown(anchor)} is set twice; give each a name of its own")
            self._anchors[anchor] = None
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event)
        else:
            if level > MAX_LEVELS:
                self._refuse(event, f"nested more than {MAX_LEVELS} levels deep; no config is")
            is_list = isinstance(event, yaml.SequenceStartEvent)
            self._check_tag(event, ("seq",) if is_list else ("map",))
            value = self._list(level) if is_list else self._mapping(level)
        if anchor is not None:
            self._anchors[anchor] = (value, self._count - before)
        return value

    def _alias(self, event: yaml.AliasEvent) -> Any:
        if event.anchor not in self._anchors:
            self._refuse(event, f"the alias *{shown(event.anchor)} names no anchor before it")
        anchored = self._anchors[event.anchor]
        if anchored is None:
            self._refuse(event, f"the alias *{shown(event.anchor)} stands within what it names; write the value out")
        value, count = anchored
        self._counted(event, count)
        return copy.deepcopy(value)  # what is overridden in one place must not change the other

    def _counted(self, event: yaml.Event, count: int) -> None:
        self._count += count
        if self._count > MAX_VALUES:
            self._refuse(event, f"more than {MAX_VALUES:,} values, aliases spelled out; no config has as many")

    def _list(self, level: int) -> list[Any]:
        items = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._value(event, level + 1))
        return items

    def _mapping(self, level: int) -> dict[Any, Any]:
        own: dict[Any, Any] = {}
        lines: dict[Any, int] = {}
        merged: dict[Any, Any] | None = None
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            if isinstance(event, yaml.ScalarEvent) and self._tag(event) == _MERGE:
                if merged is not None:
                    self._refuse(event, "<< stands twice in one mapping; give it a list")
                merged = self._merged(level)
                continue
            key = self._key(event, level)
            if key in own:
                first = f" (first in line {lines[key] + 1})" if self._is_file else ""
                self._refuse(event, f"{quoted(key)} stands twice in one mapping{first}; keep one")
            lines[key] = _line(event)
            own[key] = self._value(next(self._events), level + 1)
        return {**(merged or {}), **own}

    def _key(self, event: yaml.Event, level: int) -> str | int:
        key = self._value(event, level + 1)
        if not isinstance(key, (str, int)) or isinstance(key, bool):
            self._refuse(
                event, f"the key {quoted(key)} is a {_kind(key)}; expected text or a whole number, so quote it"
            )
        return key

    def _merged(self, level: int) -> dict[Any, Any]:
        """What ``<<`` brings, beneath the mapping's own keys. Of several the first wins, as YAML has it."""
        event = next(self._events)
        found = self._value(event, level + 1)
        merged: dict[Any, Any] = {}
        for one in found if isinstance(found, list) else [found]:
            if not isinstance(one, dict):
                self._refuse(event, f"<< is given a {_kind(one)}; expected a mapping")
            merged = {**one, **merged}
        return merged

    def _tag(self, event: yaml.ScalarEvent) -> str:
        tag: str | None = event.tag
        if tag is None or tag == "!":
            tag = self._resolver.resolve(yaml.ScalarNode, event.value, event.implicit)  # type: ignore[no-untyped-call]
        return str(tag)

    def _scalar(self, event: yaml.ScalarEvent) -> Any:
        tag = self._tag(event)
        if tag == _DATE:
            self._refuse(event, f"{quoted(event.value)} reads as a date; put it in quotes")
        self._check_tag(event, _NAMED)
        kind = tag.removeprefix(_CORE)
        if kind not in _SCALARS:
            self._refuse(event, f"{quoted(event.value)} has no meaning by itself; put it in quotes")
        if kind in ("int", "float") and len(event.value) > _LONGEST_NUMBER:
            self._refuse(event, f"a number of {len(event.value):,} characters; expected one of 64 bits")
        if kind in ("int", "float") and _OTHER_BASE.fullmatch(event.value):
            self._refuse(
                event, f"{quoted(event.value)} reads as a number to base 8 or 60; write it to base 10, or quote it"
            )
        try:
            value = getattr(self._constructor, f"construct_yaml_{kind}")(yaml.ScalarNode(tag, event.value))
        except (ValueError, KeyError, IndexError, OverflowError) as error:
            self._refuse(event, f"{quoted(event.value)} is no {kind}; put it in quotes, or mend it", error)
        if kind == "int" and value not in _INTEGERS:
            self._refuse(event, f"{shown(event.value)} is beyond 64 bits; no config holds such a number")
        if kind == "float" and not math.isfinite(value):
            self._refuse(event, f"{shown(event.value)} is no finite number; give one, or put it in quotes")
        return value

    def _check_tag(self, event: Any, allowed: tuple[str, ...]) -> None:
        if event.tag not in (None, "!", *(f"{_CORE}{kind}" for kind in allowed)):
            self._refuse(event, f"the tag {shown(event.tag.replace(_CORE, '!!'))} is not read here; leave it out")

    def _refuse(self, event: yaml.Event, problem: str, cause: Exception | None = None) -> NoReturn:
        self._refuse_line(_line(event), problem, cause)

    def _refuse_line(self, line: int, problem: str, cause: Exception | None = None) -> NoReturn:
        where = f"{self._source}, line {line + 1}" if self._is_file else self._source
        raise UsageError(f"{where}: {problem}") from cause


def _line(event: yaml.Event) -> int:
    return event.start_mark.line if event.start_mark is not None else 0


def _kind(value: object) -> str:
    """YAML's word for a value's type."""
    names = {dict: "mapping", list: "list", str: "text", bool: "boolean", int: "number", float: "number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
