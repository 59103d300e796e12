"""A console on streams that fail: nothing is raised, nothing waits for long, and what was left out is said later."""

from __future__ import annotations

import fcntl
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trtx.cli.console import ProgressConsole


@pytest.fixture
def console_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ProgressConsole]]:
    """A console whose standard output is the given descriptor, which it owns."""
    opened: list[io.TextIOWrapper] = []

    def make(descriptor: int, encoding: str = "utf-8") -> ProgressConsole:
        stream = io.TextIOWrapper(io.FileIO(descriptor, "w"), encoding=encoding, write_through=True)
        opened.append(stream)
        monkeypatch.setattr("sys.stdout", stream)
        return ProgressConsole(soft_wrap=True)

    yield make
    monkeypatch.undo()
    for stream in opened:
        stream.close()


def test_a_full_disk_raises_nothing_and_once_there_is_room_the_gap_is_told(
    tmp_path: Path, console_on: Callable[..., ProgressConsole]
) -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    console = console_on(descriptor)
    console.print("lost one")
    console.print("lost two")
    log = tmp_path / "serve.log"
    again = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(again, descriptor)  # as if the disk had room again
    os.close(again)
    console.print("kept one")
    console.print("kept two")
    assert log.read_text() == ("trtx: 2 messages were left out here: No space left on device\nkept one\nkept two\n")


def test_a_reader_that_sleeps_holds_nobody_up_and_what_it_missed_is_told(
    console_on: Callable[..., ProgressConsole],
) -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    console = console_on(writer)
    try:
        for number in range(100):
            console.print(f"message {number} " + "x" * 100)
        seen = os.read(reader, 1 << 20).decode()
        console.print("awake")
        seen += os.read(reader, 1 << 20).decode()
    finally:
        os.close(reader)
    assert "message 0 " in seen
    assert "message 99 " not in seen
    assert "messages were left out here: their reader did not read them\nawake\n" in seen


def test_a_reader_that_is_gone_is_written_to_no_more(console_on: Callable[..., ProgressConsole]) -> None:
    reader, writer = os.pipe()
    console = console_on(writer)
    os.close(reader)
    for _ in range(3):
        console.print("to nobody")


def test_a_letter_that_the_locale_lacks_is_spelled_out(console_on: Callable[..., ProgressConsole]) -> None:
    reader, writer = os.pipe()
    console = console_on(writer, encoding="ascii")
    console.print("perplexité")
    try:
        assert os.read(reader, 100) == b"perplexit\\xe9\n"
    finally:
        os.close(reader)
