"""The documents of a run directory: versioned files that are read into a typed form, or refused with file, field and
value.

A form is a dataclass or a pydantic model. Fields without a default are required, and values are not converted: the
string "8" is not accepted as the number 8.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from trtx.bench.files import write_text
from trtx.config.files import read_text
from trtx.config.strict_json import parse_json
from trtx.config.strict_yaml import parse_yaml
from trtx.config.wording import a_kind, quoted, shown
from trtx.errors import UsageError

T = TypeVar("T")
_LARGEST_BYTES = 16 << 20  # limit for a YAML document; a run manifest has about 600 bytes per cell
RESTORE = "put the file back from a copy, or start a new run"


@dataclass(frozen=True, slots=True)
class DocumentKind:
    """One kind of document: a file of a run directory, or one line of such a file."""

    file: str
    version: int  # the version that is written
    oldest: int  # the oldest version that can be read
    since: str  # what changed with the oldest version, i.e. why older documents can't be read

    def write(self, directory: Path, content: Any) -> None:
        """Writes ``directory``/file atomically: a reader sees the old content or the new, never a part.

        ``content`` is a form, or a mapping with its fields as plain values.
        """
        write_text(directory / self.file, self.text(content))

    def text(self, content: Any) -> str:
        """The text that :meth:`write` writes."""
        document = self.versioned(content if isinstance(content, dict) else plain(content))
        if self.file.endswith(".yaml"):
            return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"

    def versioned(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"schema_version": self.version, **fields}

    def read(self, directory: Path, form: type[T]) -> T:
        """Reads ``directory``/file. Raises UsageError with the file, field, value, what was expected, and what
        to do.
        """
        return self.restored(self.load(directory), form, str(directory / self.file))

    def find(self, directory: Path, form: type[T]) -> T | None:
        """Like :meth:`read`, but returns None if the file doesn't exist."""
        return self.read(directory, form) if (directory / self.file).exists() else None

    def load(self, directory: Path) -> dict[str, Any]:
        """The fields of ``directory``/file. Only the schema version has been checked."""
        return self.load_file(directory / self.file)

    def load_file(self, path: Path) -> dict[str, Any]:
        """Like :meth:`load`, for a file with any name, such as a copy."""
        try:
            if self.file.endswith(".yaml"):
                what, expected = "run manifest", "the manifest of a trtx run directory"
                document = parse_yaml(read_text(path, what, expected, limit=_LARGEST_BYTES), f"{what} {shown(path)}")
            else:
                document = parsed(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{path} can't be read ({error.strerror or error}); {RESTORE}") from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is not valid JSON ({error}); {RESTORE}") from error
        return self.checked(document, str(path))

    def checked(self, document: Any, source: str) -> dict[str, Any]:
        """Returns ``document`` if it is an object with a readable schema version. Raises UsageError otherwise."""
        if not isinstance(document, dict):
            raise UsageError(f"{source} holds {_kind(document)}; expected fields as trtx bench writes them; {RESTORE}")
        version = document.get("schema_version")
        if type(version) is int and self.oldest <= version <= self.version:
            return document
        if "schema_version" not in document:
            raise UsageError(f"{source}: schema_version is missing; expected {self._readable}; {RESTORE}")
        why = f": {self.since}" if self.since and type(version) is int and version < self.oldest else ""
        raise UsageError(
            f"{source} has schema_version {quoted(version)}, but this trtx reads {self._readable}{why}; start a new run"
        )

    @property
    def _readable(self) -> str:
        return str(self.version) if self.oldest == self.version else f"{self.oldest} to {self.version}"

    def restored(self, fields: Mapping[str, Any], form: type[T], source: str) -> T:
        """Builds the form from fields that :meth:`checked` has accepted."""
        version = fields["schema_version"]
        text = json.dumps({name: value for name, value in fields.items() if name != "schema_version"})
        try:
            return _adapter(form).validate_json(text, strict=True, context={"version": version})
        except ValidationError as error:
            raise UsageError(f"{source} (schema_version {version}): {problem(error)}; {RESTORE}") from error


def plain(content: Any) -> dict[str, Any]:
    """The fields of a form as plain values."""
    fields: dict[str, Any] = _adapter(type(content)).dump_python(content, mode="json")
    return fields


def parsed(text: str) -> Any:
    """Parses JSON like :func:`trtx.config.strict_json.parse_json`. Raises ValueError or RecursionError."""
    return parse_json(text)


def problem(error: ValidationError) -> str:
    """The first error in a document or sweep file: the field, its value, and what was expected."""
    first = error.errors()[0]
    added = first.get("ctx", {}).get("field")  # a field that a later version added
    where = shown(".".join(str(part) for part in (*first["loc"], *([added] if added else []))))
    if first["type"] == "missing":
        return f"{where} is missing; add it"
    if first["type"] == "extra_forbidden":
        return f"{where} is not a known field; leave it out"
    reason = first["msg"].removeprefix("Value error, ")
    if not where or first["type"] == "value_error":  # raised by one of trtx's validators, whose message names the field
        return reason
    if first["type"] == "too_short":
        least = first["ctx"]["min_length"]
        reason = f"at least {'one value' if least == 1 else f'{least} values'}"
    expected = reason.removeprefix("Input should be ").replace("valid tuple", "list").replace("an object", "a map")
    expected = re.sub(r" or instance of \w+", "", expected).replace("a valid integer", "a whole number")
    expected = expected.replace("a valid string", "text").replace("a valid number", "a number")
    expected = expected.replace("valid array", "list").replace("valid dictionary", "map")
    given = first["input"]
    # An attach address, or a value given in its place, may contain a password.
    is_shown = first["loc"][:1] != ("attach",) or isinstance(given, (int, float))
    return f"{where} is {shown(json.dumps(given, default=str)) if is_shown else a_kind(given)}; expected {expected}"


def _adapter(form: type[T]) -> TypeAdapter[T]:
    if form not in _adapters:
        _adapters[form] = TypeAdapter(form)
    return _adapters[form]


_adapters: dict[type[Any], TypeAdapter[Any]] = {}  # creating an adapter takes milliseconds


def _kind(document: Any) -> str:
    return "nothing" if document is None else a_kind(document)
