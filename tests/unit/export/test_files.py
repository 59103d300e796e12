"""What an export writes: all of its files or none, so that the command that failed can be given again."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from trtx.cli import app
from trtx.errors import UsageError
from trtx.export import ExportedFile, write_files

FILES = (ExportedFile("one.yaml", "a: 1\n"), ExportedFile("two.sh", "x" * 5000 + "\n", is_executable=True))


@pytest.fixture
def no_room() -> Iterator[None]:
    """No file grows beyond 1000 bytes, as on a disk that is full in the middle of it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_files_that_found_no_room_leave_nothing_and_do_not_block_the_next_attempt(
    tmp_path: Path, no_room: None
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for directory in (empty, tmp_path / "new" / "and" / "deep"):
        with pytest.raises(UsageError, match="can't be written .File too large.; make room there"):
            write_files(FILES, directory)
    assert [entry.name for entry in tmp_path.rglob("*")] == ["empty"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    write_files(FILES, tmp_path / "new")
    assert (tmp_path / "new" / "two.sh").stat().st_mode & 0o111
    with pytest.raises(UsageError, match="holds 'one.yaml' already"):
        write_files(FILES, tmp_path / "new")
    assert len(list((tmp_path / "new").iterdir())) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("nginx", "--frontends", "2"),
        ("slurm", "--model", "synthetic:tiny", "--engine", "torch", "--gpus-per-node", "0"),
        (
            "kubernetes",
            "--model",
            "synthetic:tiny",
            "--engine",
            "torch",
            "--gpus-per-node",
            "0",
            "--image",
            "r/t:1.4.2",
        ),
    ],
)
def test_an_export_that_found_no_room_is_given_again_as_it_was(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["export", *arguments, "-o", str(tmp_path / "made" / "here")]
    assert app.run([*command]) == 0, capsys.readouterr().err  # with the model's files made, which need their room
    for path in (tmp_path / "made" / "here").iterdir():
        path.unlink()
    (tmp_path / "made" / "here").rmdir()
    (tmp_path / "made").rmdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        assert app.run([*command]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "make room there" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert app.run([*command]) == 0
