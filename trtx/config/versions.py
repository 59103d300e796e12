"""Selects the column of ``llm_args.json`` that describes a version of TensorRT-LLM, and states how certain it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from trtx.errors import UsageError

Key = tuple[int, int, int, int, int]
Certainty = Literal["read", "nearest", "between"]

_FINAL = 10**6  # a release comes after all of its candidates


def _key(version: str) -> Key | None:
    found = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:rc(\d+))?(?:\.post(\d+))?(?:[.+].*)?", version.strip())
    if found is None:
        return None
    major, minor, patch, candidate, post = found.groups()
    return int(major), int(minor), int(patch or 0), int(candidate) if candidate else _FINAL, int(post or 0)


def _known(version: str) -> Key:
    key = _key(version)
    assert key is not None
    return key


# Each column with the first and the last version that it describes. 1.2.1 and 1.3.0rc7 were read from those releases;
# the source of main-2026-07 dates from between 1.3.0rc20 and rc22, that of post-rc22 from between rc24 and 1.4.0rc1
# (meta of llm_args.json).
_SPANS = tuple(
    (column, _known(first), _known(last))
    for column, first, last in (
        ("1.2.1", "1.2.1", "1.2.1"),
        ("1.3.0rc7", "1.3.0rc7", "1.3.0rc7"),
        ("main-2026-07", "1.3.0rc20", "1.3.0rc22"),
        ("post-rc22", "1.3.0rc24", "1.4.0rc1"),
    )
)
COLUMNS = tuple(column for column, _, _ in _SPANS)
# Dynamo 1.4.2 was built against 1.3.0rc22, and 1.6.1 against 1.3.0rc29. main-2026-07 is the nearest source that was
# read.
DEFAULT_VERSION = "main-2026-07"


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """A version of TensorRT-LLM and the columns that describe it.

    ``name``: the version as given. ``columns``: the one column that describes it, or the two that it lies between.
    Facts on which the two columns differ are uncertain for this version.
    """

    name: str
    columns: tuple[str, ...]
    certainty: Certainty
    key: Key

    def is_before(self, version: str) -> bool:
        return self.key < _known(version)

    def is_after(self, version: str) -> bool:
        return self.key > _known(version)

    @property
    def how_sure(self) -> str:
        """The certainty in words, such as ``1.3.0rc14: between 1.3.0rc7 and main-2026-07; …``."""
        if self.certainty == "between":
            return f"{self.name}: between {' and '.join(self.columns)}; what they disagree on is not certain"
        if self.certainty == "nearest":
            return f"{self.name}: not read itself, {self.columns[0]} is the nearest that was"
        return f"{self.name}: read"


def is_newer(version: str) -> bool:
    """Returns whether ``version`` is newer than the newest source that was read completely (main-2026-07)."""
    return _known(version) > schema_version(DEFAULT_VERSION).key


def schema_version(name: str) -> SchemaVersion:
    """Parses ``1.2.1``, ``1.3.0rc24.post1``, ``main-2026-07`` or any other version, ignoring local parts.

    Raises UsageError for text that is not a version.
    """
    name = name.strip()
    for column, first, last in _SPANS:
        if name == column:
            return SchemaVersion(name, (column,), "read", last if column == "main-2026-07" else first)
    key = _key(name)
    if key is None:
        raise UsageError(
            f"{name!r} is not a version of TensorRT-LLM; expected one such as 1.2.1 or 1.3.0rc22, or one of "
            f"{', '.join(COLUMNS)}"
        )
    for column, first, last in _SPANS:
        if first <= key <= last:
            return SchemaVersion(name, (column,), "read" if key == first == last else "nearest", key)
    older = [column for column, _, last in _SPANS if last < key]
    newer = [column for column, first, _ in _SPANS if key < first]
    if older and newer:
        return SchemaVersion(name, (older[-1], newer[0]), "between", key)
    return SchemaVersion(name, (older[-1] if older else newer[0],), "nearest", key)
