"""The lines that workers write about ended requests, read while their files grow, are renamed and begin anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from trtx.experiment.worker_rows import WorkerRowFiles


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agg-0.requests.jsonl"


@pytest.fixture
def rows(path: Path) -> Iterator[WorkerRowFiles]:
    with WorkerRowFiles([path]) as files:
        yield files


def write(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def begin_anew(path: Path) -> None:
    path.replace(path.with_name(f"{path.name}.1"))


def test_each_line_comes_once_and_a_part_of_a_line_waits_for_its_end(path: Path, rows: WorkerRowFiles) -> None:
    assert rows.take() == [], "the worker has written nothing yet"
    write(path, "one\ntw")
    assert rows.take() == ["one"] and rows.take() == []
    write(path, "o\nthree\n")
    assert rows.take() == ["two", "three"]


def test_a_renamed_file_is_read_to_its_end_however_large_the_new_one_is(path: Path, rows: WorkerRowFiles) -> None:
    write(path, "warm-up\n")
    assert rows.take() == ["warm-up"]
    write(path, "last of the old file\n")
    begin_anew(path)
    assert rows.take() == ["last of the old file"], "before the worker begins the new file"
    write(path, "".join(f"line {number} of the new file\n" for number in range(9)))
    assert rows.take() == [f"line {number} of the new file" for number in range(9)]


def test_lines_of_both_files_come_in_order(path: Path, rows: WorkerRowFiles) -> None:
    write(path, "1\n")
    rows.take()
    write(path, "2\n")
    begin_anew(path)
    write(path, "3 is longer than what was read before\n")
    assert rows.take() == ["2", "3 is longer than what was read before"]


def test_a_file_that_was_removed_gives_no_line(path: Path, rows: WorkerRowFiles) -> None:
    write(path, "1\n")
    assert rows.take() == ["1"]
    path.unlink()
    assert rows.take() == []
