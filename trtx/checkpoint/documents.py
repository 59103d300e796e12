"""A strict reader of a checkpoint's JSON files: typed fields, and errors that name the file and the field."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from trtx.checkpoint.class_defaults import ConfigValues, complete
from trtx.errors import UnsupportedModel, UsageError

CONFIG = "config.json"
_LARGEST_BYTES = 64 << 20  # an index of DeepSeek-R1's 91,991 tensors has 9 MB
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 60
_SHOWN.maxdict, _SHOWN.maxlist, _SHOWN.maxlevel = 6, 4, 2


def shown(value: object) -> str:
    """Formats any value for a message, cut to about ten words."""
    return _SHOWN.repr(value)


def shown_name(name: str) -> str:
    """Formats a name for a message as :func:`shown` does, without quotes."""
    return shown(name)[1:-1]


def read_object(path: Path, expected: str) -> dict[str, Any]:
    """Reads the JSON object in ``path``. Raises UsageError, which names the file and the ``expected`` content.

    Duplicate keys are refused, because JSON parsers differ in which value they keep.
    """
    try:
        if path.exists() and not path.is_file():
            raise _Unreadable("is not a file")
        if path.stat().st_size > _LARGEST_BYTES:
            raise _Unreadable(f"has more than {_LARGEST_BYTES >> 20} MiB")
        found = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise UsageError(f"{path} can't be read ({error.strerror or error}); expected {expected}") from error
    except _Unreadable as error:
        raise UsageError(f"{path} {error}; expected {expected}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 (byte {error.start}: {error.reason}); expected {expected}") from error
    except RecursionError as error:
        raise UsageError(f"{path} nests too deep to be read; expected {expected}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON ({error}); expected {expected}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds {_article(found)}; expected {expected}: a JSON object")
    return found


def config_fields(directory: Path) -> Fields:
    """Reads the ``config.json`` of any model, with the defaults of its class for missing fields.

    No other code opens this file.
    """
    file = directory / CONFIG
    return Fields(complete(read_object(file, "a Hugging Face config")), str(file))


class _Unreadable(Exception):
    """The reason why a file can't be read; the message completes a sentence that begins with the path."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Unreadable(f"has the key {shown(twice)} twice")
    return found


def _article(value: object) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to the fields of one JSON object. Every error names the file, the field and its value.

    ``parent``: the prefix of the field names, such as ``rope_parameters.``; "" for the top-level object.
    """

    values: Mapping[str, Any]
    file: str
    parent: str = ""

    @property
    def name(self) -> str:
        """The path of the field that contains this object."""
        return self.parent.removesuffix(".")

    def has(self, name: str) -> bool:
        """Returns whether the field exists and is not null."""
        return self.values.get(name) is not None

    def count(self, name: str, *, most: int, least: int = 1) -> int:
        """Returns an integer from ``least`` to ``most``."""
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.refuse(name, f"an integer from {least} to {most}")
        return value

    def number(self, name: str, *, above: float = -math.inf, at_least: float = -math.inf) -> float:
        """Returns a finite number that is greater than ``above`` and not less than ``at_least``."""
        value = self.values.get(name)
        bound = (
            f" above {above:g}" if above > -math.inf else f" of at least {at_least:g}" if at_least > -math.inf else ""
        )
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
            self.refuse(name, f"a finite number{bound}")
        if not (value > above and value >= at_least):
            self.refuse(name, f"a number{bound}")
        return float(value)

    def flag(self, name: str, *, missing: bool) -> bool:
        """Returns a boolean, or ``missing`` if the field is missing or null."""
        value = self.values[name] if self.has(name) else missing
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def word(self, name: str, expected: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str) or not value:
            self.refuse(name, expected)
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Returns the token ids in a field that holds one id or a list of ids."""
        value = self.values.get(name)
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 1 << 31 for token in ids):
            self.refuse(name, "a token id, or a list of them")
        return tuple(ids)

    def inner(self, name: str) -> Fields | None:
        """Returns the object in a field, or None if the field is missing or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.refuse(name, "a JSON object")
        return Fields(value, self.file, f"{self.parent}{name}.")

    def refuse(self, name: str, expected: str) -> NoReturn:
        """Raises UsageError for the field. ``expected``: the valid values and, if it is not obvious, the fix."""
        raise UsageError(self._refusal(name, expected))

    def refuse_here(self, name: str, expected: str) -> NoReturn:
        """Raises UnsupportedModel for a value that may be valid but that the torch engine does not support."""
        raise UnsupportedModel(self._refusal(name, expected))

    def _refusal(self, name: str, expected: str) -> str:
        field = f"{self.parent}{name}"[:100]
        if name not in self.values:
            return f"{self.file} has no {field}; expected {expected}"
        if isinstance(self.values, ConfigValues) and name in self.values.absent:
            silent = shown(self.values[name])
            return f"{self.file} has no {field}, which transformers takes for {silent}; expected {expected}"
        return f"{self.file}: {field} is {shown(self.values[name])}; expected {expected}"


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of a float
        return False
