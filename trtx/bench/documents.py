"""The documents of a run directory: each with its version, read into its form or refused with file, field and value.

A form is a dataclass or a pydantic model. What has no default in it must be there; nothing is converted: "8" is no 8.
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
_LARGEST_BYTES = 16 << 20  # of a YAML document: a lock has some 600 bytes a cell
RESTORE = "put the file back from a copy, or start a new run"


@dataclass(frozen=True, slots=True)
class Document:
    """One kind of document: a file of a run directory, or a line of one."""

    file: str
    version: int  # that is written
    oldest: int  # that is read
    since: str  # what changed with the oldest: why those before it are not read

    def write(self, directory: Path, content: Any) -> None:
        """``directory``/file at once: a reader sees the old one or the new, never a part.

        ``content``: a form, or the fields of one as plain values.
        """
        write_text(directory / self.file, self.text(content))

    def text(self, content: Any) -> str:
        """What :meth:`write` writes."""
        document = self.versioned(content if isinstance(content, dict) else plain(content))
        if self.file.endswith(".yaml"):
            return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"

    def versioned(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"schema_version": self.version, **fields}

    def read(self, directory: Path, form: type[T]) -> T:
        """``directory``/file. Raises UsageError: file, field, value, what was expected, what to do."""
        return self.restored(self.load(directory), form, str(directory / self.file))

    def find(self, directory: Path, form: type[T]) -> T | None:
        """The same; None where there is no such file."""
        return self.read(directory, form) if (directory / self.file).exists() else None

    def load(self, directory: Path) -> dict[str, Any]:
        """The fields of ``directory``/file, of a version that is read, and nothing else known of them."""
        return self.load_file(directory / self.file)

    def load_file(self, path: Path) -> dict[str, Any]:
        """The same of a file of any name, such as a copy."""
        try:
            if self.file.endswith(".yaml"):
                what, expected = "run record", "that of a run directory of trtx bench"
                document = parse_yaml(read_text(path, what, expected, limit=_LARGEST_BYTES), f"{what} {shown(path)}")
            else:
                document = parsed(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{path} can't be read ({error.strerror or error}); {RESTORE}") from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is not JSON, it was cut short or is another's ({error}); {RESTORE}") from error
        return self.checked(document, str(path))

    def checked(self, document: Any, source: str) -> dict[str, Any]:
        """Raises UsageError where ``document`` is none of ours, or of a version that is not read."""
        if not isinstance(document, dict):
            raise UsageError(f"{source} holds {_kind(document)}; expected fields, as trtx bench writes them; {RESTORE}")
        version = document.get("schema_version")
        if type(version) is int and self.oldest <= version <= self.version:
            return document
        if "schema_version" not in document:
            raise UsageError(f"{source}: schema_version is missing; expected {self._readable}; {RESTORE}")
        why = f": {self.since}" if self.since and type(version) is int and version < self.oldest else ""
        raise UsageError(
            f"{source} has schema_version {quoted(version)}, this trtx reads {self._readable}{why}; start a new run"
        )

    @property
    def _readable(self) -> str:
        return str(self.version) if self.oldest == self.version else f"{self.oldest} to {self.version}"

    def restored(self, fields: Mapping[str, Any], form: type[T], source: str) -> T:
        """The form of what :meth:`checked` let through."""
        version = fields["schema_version"]
        said = json.dumps({name: value for name, value in fields.items() if name != "schema_version"})
        try:
            return _adapter(form).validate_json(said, strict=True, context={"version": version})
        except ValidationError as error:
            raise UsageError(f"{source} (schema_version {version}): {problem(error)}; {RESTORE}") from error


def plain(content: Any) -> dict[str, Any]:
    """The fields of a form as plain values."""
    fields: dict[str, Any] = _adapter(type(content)).dump_python(content, mode="json")
    return fields


def parsed(text: str) -> Any:
    """Of JSON, as :func:`trtx.config.strict_json.parse_json`. Raises ValueError, RecursionError."""
    return parse_json(text)


def problem(error: ValidationError) -> str:
    """The first thing that is wrong with a document or a sweep: its field, its value, what was expected of it."""
    first = error.errors()[0]
    added = first.get("ctx", {}).get("field")  # a field that came with a later version
    where = shown(".".join(str(part) for part in (*first["loc"], *([added] if added else []))))
    if first["type"] == "missing":
        return f"{where} is missing; expected it"
    if first["type"] == "extra_forbidden":
        return f"{where} is no field of it; leave it out"
    reason = first["msg"].removeprefix("Value error, ")
    if not where or first["type"] == "value_error":  # said by a check of our own, which names the field
        return reason
    if first["type"] == "too_short":
        least = first["ctx"]["min_length"]
        reason = f"{'one value' if least == 1 else f'{least} values'} at least"
    expected = reason.removeprefix("Input should be ").replace("valid tuple", "list").replace("an object", "a map")
    expected = re.sub(r" or instance of \w+", "", expected).replace("a valid integer", "a whole number")
    expected = expected.replace("a valid string", "text").replace("a valid number", "a number")
    expected = expected.replace("valid array", "list").replace("valid dictionary", "map")
    given = first["input"]
    # Of a server elsewhere: an address, or what stands in place of one, may hold a password.
    is_shown = first["loc"][:1] != ("attach",) or isinstance(given, (int, float))
    return f"{where} is {shown(json.dumps(given, default=str)) if is_shown else a_kind(given)}; expected {expected}"


def _adapter(form: type[T]) -> TypeAdapter[T]:
    if form not in _adapters:
        _adapters[form] = TypeAdapter(form)
    return _adapters[form]


_adapters: dict[type[Any], TypeAdapter[Any]] = {}  # one takes milliseconds to make


def _kind(document: Any) -> str:
    return "nothing" if document is None else a_kind(document)
