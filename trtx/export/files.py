"""What an export comes to: a few text files, written into one directory or shown as one text."""

from __future__ import annotations

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
    """Writes them into ``directory``, which is made, and which may hold nothing else.

    Raises UsageError where something is there already, or can't be written: files of another export beside these would
    be applied with them.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        found = sorted(entry.name for entry in directory.iterdir())
        if found:
            raise UsageError(
                f"{quoted(str(directory))} holds {quoted(found[0])} already; expected a new or an empty directory, "
                "so that nothing of another export is applied with this one"
            )
        for file in files:
            path = directory / file.name
            path.write_text(file.text, encoding="utf-8")
            if file.is_executable:
                path.chmod(0o755)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"{quoted(str(directory))} can't be written ({reason}); name another directory") from error


def as_one_text(files: Sequence[ExportedFile]) -> str:
    """All of them one after another, as ``kubectl apply -f -`` takes several manifests."""
    return "".join(file.text for file in files)
