"""Which code of trtx runs: the commit of its checkout, what differs from it, and a hash of the sources themselves."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

_DIGITS = 12
_PLAIN_DIFF = (  # whatever a person's own configuration of git makes of a diff, its hash is the same
    "diff", "HEAD", "--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames",
    "--diff-algorithm=myers", "--unified=3", "--src-prefix=a/", "--dst-prefix=b/", "--submodule=short",
)  # fmt: skip


def commit_of(checkout: Path) -> tuple[str | None, str | None]:
    """The commit, and a hash of what tracked files differ from it, None where they don't.

    Both None where ``checkout`` is none: trtx is installed. Files that git does not track are in neither.
    """
    if not (checkout / ".git").exists():
        return None, None
    commit = _git(checkout, "rev-parse", f"--short={_DIGITS}", "HEAD")
    changes = _git(checkout, *_PLAIN_DIFF)
    if commit is None or changes is None:
        return None, None
    return commit.decode().strip(), hashlib.sha256(changes).hexdigest()[:_DIGITS] if changes else None


def sources_hash(package: Path) -> str:
    """Changes with the code that measures and serves, committed or not, and not with a commit to a document."""
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
