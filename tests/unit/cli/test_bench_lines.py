"""Lines on standard error end between words on a terminal, and stay one elsewhere. A real terminal of 80 columns."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trtx.cli.bench_lines import tell, wrapped
from trtx.cli.bench_view import BenchView

WORDS = "agg-c1, agg-c2 request_latency:p99:le:500 no verdict: p99 takes 662 requests, and there are 20; measure more"
END = "that was all"
PATH = Path("/runs") / ("x" * 100) / "report.html"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Callable[[], str]]]:
    """Standard error as a terminal of so many columns; what is called then gives what was written to it."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TERM", "dumb")  # no bars, which would move the cursor
    master, slave = pty.openpty()
    stream = os.fdopen(slave, "w", buffering=1)

    def of(columns: int) -> Callable[[], str]:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        monkeypatch.setattr("sys.stderr", stream)
        return written

    def written() -> str:
        """All of it: a terminal hands it over piece by piece."""
        stream.write(END)
        stream.flush()
        found = b""
        while not found.endswith(END.encode()):
            found += os.read(master, 1 << 16)
        return found.decode().removesuffix(END).replace("\r\n", "\n")

    yield of
    monkeypatch.undo()
    stream.close()
    os.close(master)


@pytest.mark.parametrize("columns", [80, 40])
def test_a_long_line_ends_between_words_at_the_width_of_the_terminal(
    terminal: Callable[[int], Callable[[], str]], columns: int
) -> None:
    written = terminal(columns)
    tell(f"trtx: 6 of 9 judgements did not pass: {WORDS}")
    lines = written().splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= columns
    assert " ".join(lines) == f"trtx: 6 of 9 judgements did not pass: {WORDS}"


def test_what_goes_on_is_told_so_too_and_a_path_is_left_whole(terminal: Callable[[int], Callable[[], str]]) -> None:
    written = terminal(80)
    view = BenchView()
    view.listener.on_start(PATH)
    view.listener.on_cells((), tuple(f"agg-c{n}" for n in range(60)), 60)
    view.listener.on_cells(tuple(f"agg-c{n}" for n in range(60)), (), 60)
    lines = written().splitlines()
    assert str(PATH) in lines or f"run: {PATH}" in lines
    others = [line for line in lines if "xxx" not in line]
    assert max(map(len, others)) <= 80 and " ".join(others).count("agg-c") == 60
    tell(f"go on with it: {PATH}")
    assert str(PATH) in written().splitlines()


def test_the_environment_may_say_another_width_and_a_terminal_that_knows_none_is_left_alone(
    terminal: Callable[[int], Callable[[], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal(0)
    assert wrapped(WORDS) == WORDS
    monkeypatch.setenv("COLUMNS", "50")
    assert max(map(len, wrapped(WORDS).split("\n"))) <= 50


def test_elsewhere_a_line_stays_one(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    tell(WORDS)
    BenchView().listener.on_cells(tuple(f"agg-c{n}" for n in range(60)), (), 60)
    first, kept, ahead = capfd.readouterr().err.splitlines()
    assert first == WORDS and kept.endswith("agg-c59") and ahead == "to measure: nothing"
