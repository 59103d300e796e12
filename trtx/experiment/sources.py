"""Identifies the code of trtx that runs: commit of the checkout, changes to it, and a hash of the sources."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

_DIGITS = 12
_PLAIN_DIFF = (  # independent of the user's git configuration, so that the hash is stable
    "diff", "HEAD", "--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames",
    "--diff-algorithm=myers", "--unified=3", "--src-prefix=a/", "--dst-prefix=b/", "--submodule=short",
)  # fmt: skip


def commit_of(checkout: Path) -> tuple[str | None, str | None]:
    """The commit, and a hash of the changes to tracked files (None without changes).

    Both are None if ``checkout`` is not a git checkout because trtx was installed. Untracked files are ignored.
    """
    if not (checkout / ".git").exists():
        return None, None
    commit = _git(checkout, "rev-parse", f"--short={_DIGITS}", "HEAD")
    changes = _git(checkout, *_PLAIN_DIFF)
    if commit is None or changes is None:
        return None, None
    return commit.decode().strip(), hashlib.sha256(changes).hexdigest()[:_DIGITS] if changes else None


def sources_hash(package: Path) -> str:
    """Hash of the Python sources. Uncommitted and untracked ``.py`` files count; other files don't."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:_DIGITS]


def _git(checkout: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
