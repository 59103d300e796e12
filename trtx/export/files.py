"""What an export comes to: a few text files, written into one directory or shown as one text."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtx.config.wording import quoted
from trtx.errors import UsageError


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """``name`` is a file name without directories; ``text`` ends with a line end."""

    name: str
    text: str
    is_executable: bool = False


def write_files(files: Sequence[ExportedFile], directory: Path) -> None:
    """Writes them into ``directory``, which is made, and which may hold nothing else. All of them or, where that
    fails, none, and no directory that was not there before: the same command is then tried again.

    Raises UsageError where something is there already, or can't be written: files of another export beside these would
    be applied with them.
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
    except BaseException as error:  # Ctrl-C too
        _take_back([directory / file.name for file in files], made)
        if isinstance(error, OSError):
            raise _refusal(directory, error) from error
        raise


def _take_back(files: Sequence[Path], directories: Sequence[Path]) -> None:
    """As far as that can be done; directories from the innermost on."""
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
    """All of them one after another, as ``kubectl apply -f -`` takes several manifests."""
    return "".join(file.text for file in files)
