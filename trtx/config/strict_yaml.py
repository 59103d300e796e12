"""trtx's only YAML parser. It reads a value exactly as written, or refuses it and names the line.

It refuses input that other parsers silently change: duplicate keys, recursive aliases, ``2001-01-01`` as a date. It
bounds the size of a file, its depth and its number of values. An alias counts once for each use, because a few lines of
YAML can expand to billions of values.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import yaml
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from trtx.config.files import read_text
from trtx.config.wording import quoted, shown
from trtx.errors import UsageError

MAX_LEVELS = 32
"""The maximum depth. TensorRT-LLM's own arguments have five levels."""
MAX_VALUES = 100_000
"""The maximum number of values, with aliases expanded. An expert placement of 60 layers with 320 slots has 20,000."""
_INTEGERS = range(-(2**63), 2**64)  # the integers that JSON parsers, C++ and TensorRT-LLM can represent
_LONGEST_NUMBER = 400  # characters; int() is quadratic, and refuses more than 4,300 digits

_CORE = "tag:yaml.org,2002:"
_MERGE = f"{_CORE}merge"
_SCALARS = ("str", "int", "float", "bool", "null")
_NAMED = ("str", "int", "float", "bool")  # without null: !!null would drop the value after it
# In YAML 1.1, as PyYAML reads it, 12:30 is 750 and 010 is 8. The author of a config never means that.
_OTHER_BASE = re.compile(r"[-+]?(?:0[0-7_]+|[0-9_.]+(?::[0-9_.]+)+)")
_DATE = f"{_CORE}timestamp"
_RESOLVER = Resolver()
# For text of these characters libyaml emits the same events as PyYAML, in a tenth of the time. With tabs, tags, block
# scalars, complex keys, byte order marks or control characters the two differ: each accepts some input that the other
# refuses or reads differently.
_READ_ALIKE = re.compile(r"[\n \"-=@-{}~]*")
_LIBYAML: Any = getattr(yaml, "CSafeLoader", None)  # None if PyYAML was built without libyaml


def read_yaml(path: Path, what: str, expected: str) -> Any:
    """Reads the document in the file ``path``; returns None for an empty file.

    ``what``: the kind of file; ``expected``: the content it should have. Raises UsageError with the file, the line, the
    problem and the fix.
    """
    return parse_yaml(read_text(path, what, expected), f"{what} {shown(path)}")


def parse_yaml(text: str, source: str, *, is_file: bool = True) -> Any:
    """Parses ``text``, which must hold one document; returns None if it is empty.

    The result consists of dicts, lists, str, finite numbers, booleans and None; keys are str or int. Raises UsageError,
    whose message begins with ``source``, and with the line number if ``is_file``.
    """
    if _LIBYAML is not None and _READ_ALIKE.fullmatch(text):
        with contextlib.suppress(UsageError):  # parsed again below, for PyYAML's error message
            return _Reader(text, source, is_file, _LIBYAML).read()
    return _Reader(text, source, is_file, yaml.SafeLoader).read()


class _Reader:
    """Builds values from PyYAML's events. PyYAML's own composer recurses without bound and drops duplicate keys."""

    def __init__(self, text: str, source: str, is_file: bool, loader: Any) -> None:
        self._source, self._is_file, self._text, self._loader = source, is_file, text, loader
        self._events: Iterator[yaml.Event] = iter(())
        self._constructor = SafeConstructor()
        # anchor -> (value, number of values in it); None while the anchored value is still being read
        self._anchors: dict[str, tuple[Any, int] | None] = {}
        self._count = 0

    def read(self) -> Any:
        try:
            self._events = iter(yaml.parse(self._text, Loader=self._loader))
            next(self._events)  # StreamStartEvent
            if isinstance(next(self._events), yaml.StreamEndEvent):
                return None
            value = self._value(next(self._events), 1)
            next(self._events)  # DocumentEndEvent
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
            self._refuse(
                event, f"the alias *{shown(event.anchor)} is used inside the value that it names; write the value out"
            )
        value, count = anchored
        self._counted(event, count)
        return copy.deepcopy(value)  # an override of one copy must not change the other

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
                    self._refuse(event, "<< occurs twice in one mapping; give it a list")
                merged = self._merged(level)
                continue
            key = self._key(event, level)
            if key in own:
                first = f" (first in line {lines[key] + 1})" if self._is_file else ""
                self._refuse(event, f"{quoted(key)} occurs twice in one mapping{first}; keep one")
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
        """Returns the mapping that ``<<`` merges in. If several mappings have a key, the first wins, as in YAML."""
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
            tag = _implied_tag(event.value, event.implicit)
        return tag

    def _scalar(self, event: yaml.ScalarEvent) -> Any:
        tag = self._tag(event)
        if tag == _DATE:
            self._refuse(event, f"{quoted(event.value)} reads as a date; put it in quotes")
        self._check_tag(event, _NAMED)
        kind = tag.removeprefix(_CORE)
        if kind not in _SCALARS:
            self._refuse(event, f"{quoted(event.value)} has no meaning by itself; put it in quotes")
        if kind == "str":
            return event.value
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
            self._refuse(event, f"{shown(event.value)} is not a finite number; give one, or put it in quotes")
        return value

    def _check_tag(self, event: Any, allowed: tuple[str, ...]) -> None:
        if event.tag is not None and event.tag not in ("!", *(f"{_CORE}{kind}" for kind in allowed)):
            self._refuse(event, f"the tag {shown(event.tag.replace(_CORE, '!!'))} is not read here; leave it out")

    def _refuse(self, event: yaml.Event, problem: str, cause: Exception | None = None) -> NoReturn:
        self._refuse_line(_line(event), problem, cause)

    def _refuse_line(self, line: int, problem: str, cause: Exception | None = None) -> NoReturn:
        where = f"{self._source}, line {line + 1}" if self._is_file else self._source
        raise UsageError(f"{where}: {problem}") from cause


@lru_cache(maxsize=4096)  # the keys of configs repeat
def _implied_tag(text: str, implicit: tuple[bool, bool]) -> str:
    """The tag of a scalar that is written without one."""
    return str(_RESOLVER.resolve(yaml.ScalarNode, text, implicit))  # type: ignore[no-untyped-call]


def _line(event: yaml.Event) -> int:
    return event.start_mark.line if event.start_mark is not None else 0


def _kind(value: object) -> str:
    """Returns YAML's name for the type of a value."""
    names = {dict: "mapping", list: "list", str: "text", bool: "boolean", int: "number", float: "number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
