"""Which code ran, of a real checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from trtx.experiment.sources import commit_of, sources_hash


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "code.py").write_text("x = 1\n")
    for arguments in (["init", "-q"], ["add", "code.py"], ["commit", "-qm", "first"]):
        git(tmp_path, *arguments)
    return tmp_path


def git(checkout: Path, *arguments: str) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, "-C", str(checkout), *arguments], check=True)


def test_a_checkout_without_changes_is_its_commit_alone(checkout: Path) -> None:
    commit, changes = commit_of(checkout)
    assert commit is not None and len(commit) == 12 and changes is None
    (checkout / "code.py").write_text("x = 1\n")  # another time, the same content
    (checkout / "notes.txt").write_text("not tracked\n")
    assert commit_of(checkout) == (commit, None)


def test_changes_have_a_hash_that_follows_them_staged_or_not_and_no_setting_of_git(checkout: Path) -> None:
    (checkout / "code.py").write_text("x = 2\n")
    commit, changes = commit_of(checkout)
    assert commit is not None and changes is not None and len(changes) == 12
    git(checkout, "add", "code.py")
    for setting in (("diff.noprefix", "true"), ("diff.algorithm", "patience"), ("diff.external", "cat")):
        git(checkout, "config", *setting)
    assert commit_of(checkout) == (commit, changes)
    (checkout / "code.py").write_text("x = 3\n")
    assert commit_of(checkout)[1] not in (None, changes)


def test_what_is_no_checkout_or_has_no_commit_has_none(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == (None, None)
    git(tmp_path, "init", "-q")
    assert commit_of(tmp_path) == (None, None)


def test_the_sources_hash_changes_with_code_and_not_with_documents(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("x = 1\n")
    before = sources_hash(tmp_path)
    (tmp_path / "README.md").write_text("words\n")
    assert sources_hash(tmp_path) == before
    (tmp_path / "code.py").write_text("x = 2\n")
    changed = sources_hash(tmp_path)
    (tmp_path / "code.py").rename(tmp_path / "other.py")
    assert len({before, changed, sources_hash(tmp_path)}) == 3
