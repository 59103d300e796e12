"""The files of an export, and how they are written into a directory or printed as one text."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtx.config.wording import quoted
from trtx.errors import UsageError


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """One text file. ``name``: the file name without directories. ``text``: ends with a newline."""

    name: str
    text: str
    is_executable: bool = False


def write_files(files: Sequence[ExportedFile], directory: Path) -> None:
    """Writes ``files`` into ``directory``, which must be empty and is created if it does not exist.

    It writes all files or none: after a failure it removes them and the directories that it created, so the same
    command can be repeated. Raises UsageError if the directory is not empty, because the files of another export in it
    would be applied too, or if a file can't be written.
    """
    made = [one for one in (directory, *directory.parents) if not one.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        found = sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        _take_back([], made)
        raise _refusal(directory, error) from error
    if found:
        raise UsageError(
            f"{quoted(str(directory))} holds {quoted(found[0])} already; expected a new or an empty directory, "
            "so that nothing of another export is applied with this one"
        )
    try:
        for file in files:
            path = directory / file.name
            path.write_text(file.text, encoding="utf-8")
            if file.is_executable:
                path.chmod(0o755)
    except BaseException as error:  # includes KeyboardInterrupt
        _take_back([directory / file.name for file in files], made)
        if isinstance(error, OSError):
            raise _refusal(directory, error) from error
        raise


def _take_back(files: Sequence[Path], directories: Sequence[Path]) -> None:
    """Removes the files, then the directories from the innermost outwards, and ignores errors."""
    for path in files:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    for path in directories:
        with contextlib.suppress(OSError):
            path.rmdir()


def _refusal(directory: Path, error: OSError) -> UsageError:
    reason = error.strerror or str(error)
    return UsageError(
        f"{quoted(str(directory))} can't be written ({reason}); make room there, or name another directory"
    )


def as_one_text(files: Sequence[ExportedFile]) -> str:
    """Concatenates the files; ``kubectl apply -f -`` accepts several manifests in one text."""
    return "".join(file.text for file in files)
