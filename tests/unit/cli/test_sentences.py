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

from trtx.cli.app import run
from trtx.cli.console import warn
from trtx.cli.run_view import RunProgress
from trtx.cli.sentences import fill, tell, wrapped

WORDS = "agg-c1, agg-c2 request_latency:p99:le:500 no verdict: p99 needs 662 requests, but there are 20; measure more"
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
    tell(f"trtx: 6 of 9 checks did not pass: {WORDS}")
    lines = written().splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= columns
    assert " ".join(lines) == f"trtx: 6 of 9 checks did not pass: {WORDS}"


def test_what_goes_on_is_told_so_too_and_a_path_is_left_whole(terminal: Callable[[int], Callable[[], str]]) -> None:
    written = terminal(80)
    view = RunProgress()
    view.on_start(PATH)
    view.on_cells((), tuple(f"agg-c{n}" for n in range(60)), 60)
    view.on_cells(tuple(f"agg-c{n}" for n in range(60)), (), 60)
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


REFUSED = [
    ["bench", "--sweep", "no-such-sweep-file-in-this-directory.yaml", "--concurrency", "1,2,4"],
    ["bench", "--concurency", "8"],  # what Typer itself refuses
    ["bench", "--trials", "0"],
    ["serve", "--engine", "torch-of-another-world"],
    ["compare", "no-such-run-of-trtx-bench-a", "no-such-run-of-trtx-bench-b"],
    ["report", "no-such-run-directory-of-trtx-bench-or-of-trtx-eval"],
    ["eval", "parity", "--resume", "no-such-run-directory-of-trtx-eval-parity"],
    ["export", "kubernetes", "--mode", "somewhere-else-than-agg-or-disagg"],
    ["doctor", "--port", "65536"],
    ["nonsense", "that", "is", "no", "verb", "of", "trtx", "at", "all"],
]


@pytest.mark.parametrize("argv", REFUSED, ids=" ".join)
def test_what_a_verb_refuses_ends_between_words_on_a_terminal_and_is_one_line_in_a_pipe(
    argv: list[str],
    terminal: Callable[[int], Callable[[], str]],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as in_a_pipe:
        in_a_pipe.setenv("COLUMNS", "40")  # which is of terminals
        assert run(argv) == 2
    (sentence,) = capfd.readouterr().err.splitlines()
    written = terminal(40)
    assert run(argv) == 2
    lines = written().splitlines()
    assert len(lines) > 1 and " ".join(lines) == sentence
    assert all(len(line) <= 40 or " " not in line for line in lines)


def test_findings_keep_their_list_and_go_on_under_their_dash() -> None:
    lines = fill("  - agg: max_batch_size is larger than max_num_tokens, which no step of the engine can hold", 40)
    assert lines == [
        "  - agg: max_batch_size is larger than",
        "    max_num_tokens, which no step of the",
        "    engine can hold",
    ]


@pytest.mark.parametrize(
    "whole",
    [
        "/runs/of-a-machine/whose-name-is-long/20261122T081500Z-bench-9a1c6852",
        "https://host-of-a-cluster.example/v1/chat/completions?model=a-b-c-d-e-f-g",
        "--router-temperature-of-prefill-and-decode",
        """'/runs of a person/whose client's name/has spaces in it'""",
        """{"kv_cache_config": {"dtype": "fp8", "of": [1, 2, "a {b"]}, "max_batch_size": 8}""",
    ],
)
def test_what_is_copied_stays_in_one_piece(whole: str) -> None:
    for columns in range(20, 90):
        lines = fill(f"it can't be read ({whole}); expected another one, so go on with that in its place", columns)
        (line,) = (line for line in lines if whole in line)
        assert len(line) <= columns or line == f"({whole});"


def test_a_command_that_ends_a_sentence_stays_in_one_piece() -> None:
    command = "trtx bench --resume '/runs of mine/20261122T081500Z-bench-9a1c6852'"
    assert fill(f"the run ended early; go on with it: {command}", 50)[-1] == command


def test_text_is_as_wide_as_it_is_shown() -> None:
    accented = "e\u0301" * 8
    assert fill(f"模型 模型 模型 {accented} x", 10) == ["模型 模型", "模型", f"{accented} x"]


def test_brackets_and_quotes_that_nothing_closes_are_characters() -> None:
    assert fill("{ " * 5000 + "' " * 5000, 20)[0] == "{ { { { { { { { { {"


def test_what_happens_to_a_topology_is_told_so(terminal: Callable[[int], Callable[[], str]]) -> None:
    written = terminal(80)
    RunProgress().say(f"agg: {WORDS}")
    warn([WORDS])
    lines = written().splitlines()
    assert max(map(len, lines)) <= 80 and " ".join(lines) == f"agg: {WORDS} trtx: warning: {WORDS}"


def test_names_are_shown_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    warn(["[red] of :100: and [/] are no colors"])
    assert capfd.readouterr().err == "trtx: warning: [red] of :100: and [/] are no colors\n"


def test_elsewhere_a_line_stays_one(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    tell(WORDS)
    RunProgress().on_cells(tuple(f"agg-c{n}" for n in range(60)), (), 60)
    first, kept, ahead = capfd.readouterr().err.splitlines()
    assert first == WORDS and kept.endswith("agg-c59") and ahead == "to measure: nothing"
