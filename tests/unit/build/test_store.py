"""A build's directory is whole or not there, whoever is killed while making it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trtx.build.store import check_space, is_disk_full, partial_directory
from trtx.errors import UsageError

# Fills a partial directory, says so, and waits to be told to publish it.
MAKER = """
import sys
from pathlib import Path
from trtx.build.store import partial_directory
with partial_directory(Path(sys.argv[1]), on_wait=lambda: print("waiting", flush=True)) as partial:
    if partial is None:
        print("found", flush=True)
        sys.exit()
    (partial.path / "half").write_text("written")
    print("half", flush=True)
    sys.stdin.readline()
    partial.publish()
"""


def start_maker(target: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAKER, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def said(maker: subprocess.Popen[str]) -> str:
    assert maker.stdout is not None
    return maker.stdout.readline().strip()


@pytest.fixture
def makers() -> object:
    started: list[subprocess.Popen[str]] = []

    def start(target: Path) -> subprocess.Popen[str]:
        started.append(start_maker(target))
        return started[-1]

    yield start
    for maker in started:
        maker.kill()
        maker.wait()
        for pipe in (maker.stdin, maker.stdout):
            assert pipe is not None
            pipe.close()


Start = Callable[[Path], "subprocess.Popen[str]"]


def never() -> None:
    raise AssertionError("nobody else is at it")


def test_what_is_published_is_whole_and_alone(tmp_path: Path) -> None:
    target = tmp_path / "parent" / "build"
    with partial_directory(target, on_wait=never) as partial:
        assert partial is not None
        (partial.path / "folder").mkdir()
        (partial.path / "folder" / "file").write_text("content")
        assert not target.exists()
        partial.publish()
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == [
        "parent",
        "parent/build",
        "parent/build/folder",
        "parent/build/folder/file",
    ]
    with partial_directory(target, on_wait=never) as again:
        assert again is None


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="half way"), partial_directory(tmp_path / "b", on_wait=never) as partial:
        assert partial is not None
        (partial.path / "file").write_text("content")
        raise RuntimeError("half way")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_maker_leaves_no_build_and_the_next_one_clears_up(tmp_path: Path, makers: Start) -> None:
    killed = makers(tmp_path / "first")
    assert said(killed) == "half"
    killed.kill()
    killed.wait()
    assert not (tmp_path / "first").exists()
    with partial_directory(tmp_path / "second", on_wait=never) as partial:
        assert partial is not None
        partial.publish()
    assert [path.name for path in tmp_path.iterdir()] == ["second"]


def test_a_killed_maker_is_followed_by_an_empty_directory(tmp_path: Path, makers: Start) -> None:
    killed = makers(tmp_path / "build")
    assert said(killed) == "half"
    killed.kill()
    killed.wait()
    with partial_directory(tmp_path / "build", on_wait=never) as partial:
        assert partial is not None
        assert not (partial.path / "half").exists()


def test_of_two_makers_one_waits_and_finds_what_the_other_made(tmp_path: Path, makers: Start) -> None:
    first = makers(tmp_path / "build")
    assert said(first) == "half"
    second = makers(tmp_path / "build")
    assert said(second) == "waiting"
    with partial_directory(tmp_path / "other", on_wait=never) as partial:  # whose sweep leaves the living one alone
        assert partial is not None
    assert first.stdin is not None
    first.stdin.write("\n")
    first.stdin.flush()
    assert first.wait(30) == 0
    assert said(second) == "found"
    assert [path.name for path in tmp_path.iterdir()] == ["build"]
    assert [path.name for path in (tmp_path / "build").iterdir()] == ["half"]


def test_of_two_makers_the_second_makes_it_where_the_first_is_killed(tmp_path: Path, makers: Start) -> None:
    first = makers(tmp_path / "build")
    assert said(first) == "half"
    second = makers(tmp_path / "build")
    assert said(second) == "waiting"
    first.kill()
    assert said(second) == "half"


def test_a_parent_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with (
        pytest.raises(UsageError, match=r"output directory .*file.* can't be written"),
        partial_directory(tmp_path / "file" / "build", on_wait=never),
    ):
        pass


def test_too_little_space_is_refused_with_both_figures(tmp_path: Path) -> None:
    check_space(tmp_path, 1)
    with pytest.raises(
        UsageError, match=r"is full: the build needs about 1,152,921,504,606,846,976 bytes and [\d,]+ are"
    ):
        check_space(tmp_path, 1 << 60)


def test_a_full_disk_is_told_from_other_errors() -> None:
    with pytest.raises(OSError) as full, Path("/dev/full").open("wb", buffering=0) as device:
        device.write(b"x")
    assert is_disk_full(full.value)
    # safetensors 0.8.0 on a full tmpfs: an error of its own, with the system's as text.
    assert is_disk_full(Exception("Error while serializing: I/O error: No space left on device (os error 28)"))
    assert not is_disk_full(FileNotFoundError(2, "No such file"))
    assert not is_disk_full(ValueError("28"))
