"""What the fuzz tests share: odd values, the judge of one command line, and how many cases a run has.

Like the examples of a property test, ``make test`` has a share of the cases and ``make proof`` all of them.
``TRTX_FUZZ_CASES`` multiplies the cases of every test, ``TRTX_FUZZ_SEED`` draws others: a longer run by hand.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

import typer
from examples import examples

from trtx.cli import app
from trtx.cli.verb_help import option_name
from trtx.launch.ports import HOLDER

SEED = int(os.environ.get("TRTX_FUZZ_SEED", "7"))
TIMES = int(os.environ.get("TRTX_FUZZ_CASES", "1"))
CPU_SECONDS, WALL_SECONDS = 10, 60  # of one case; the second is for what hangs and takes no CPU time

LONG = "x" * 5000
ODD_TEXTS = (
    "", " ", "~nobody/", "~no-such-user/",
    "http://[::1", "a/b/c", LONG, "a/" + "b" * 300, "\n", "\x1b[31m", "²", "١", "é", "\u202e", "-",
    "--", "..", "/", "/dev/zero", "/dev/null", "/proc/self/mem", "synthetic:", "synthetic:../../x", "a b", "a//b", "\0",
    "http://a:99999", "http://a:b", "http://", "ftp://x", "none", "null", "{}", "[", "{a: 1, a: 2}", "%s", "${X}",
    "9" * 5000, "99999999999999999999", "-1", "0", "1e9", "1e400", ".nan", "0x10", "1_0", "010", "12:30", "2001-99-99",
    "true", "fifo", "directory", "dangling", "loop", "loop/x", "file", "file/x", "empty", "unreadable", "\udcff",
)  # fmt: skip
ODD_VALUES: tuple[object, ...] = (
    None, True, False, -1, 0, 1, 2**31, 2**63, 10**30, 1.5, -0.5, 1e308, "", "four", "8", "x" * 3000, [], [1], ["x"],
    [None], [[1]], {}, {"a": 1}, {"1": {}}, [{}], "auto", "\u0000", "a\nb", -(2**63),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    out: str
    err: str


class TooLongError(BaseException):
    """Not an Exception: nothing in trtx may take it for its own."""


def cases(count: int, *names: object) -> Iterator[random.Random]:
    """The share of ``count`` that this run has, times ``TRTX_FUZZ_CASES``: generators, each of its own seed, so that a
    case can be run again by itself."""
    for number in range(examples(count) * TIMES):
        yield random.Random(f"{SEED}/{'/'.join(map(str, names))}/{number}")


def ask(argv: Sequence[str]) -> Answer:
    """One command line, in this process, within bounds of time."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with _bounded(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = app.run(list(argv))
    except TooLongError:
        raise AssertionError(f"{[word[:200] for word in argv]} takes longer than it may") from None
    with HOLDER._lock:
        held = list(HOLDER._held)
    HOLDER.release(held)  # of a dry run; a process would have ended
    return Answer(code, out.getvalue(), err.getvalue())


def judge(argv: Sequence[str], answer: Answer) -> None:
    """Exit 0, 2 or 4, and a sentence of less than 1,000 characters that names options of that verb alone."""
    case = f"{[word[:200] for word in argv]} -> {answer.code}: {answer.err[-3000:]}"
    assert answer.code in (0, 2, 4), case
    assert "Traceback" not in answer.err, case
    if answer.code == 0:
        return
    is_check = "--check" in argv and "findings" not in answer.err and not answer.err
    assert is_check or answer.err.startswith("trtx: "), case
    assert len(answer.err) < 1000, case
    lines = answer.err.rstrip("\n").split("\n")
    assert len(lines) == 1 or all(line.startswith("  - ") for line in lines[1:]), case
    assert all(character.isprintable() or character == "\n" for character in answer.err), case
    if verb := verb_of(argv):
        own_words = re.sub(r"\b(trtx|hf|pip|docker) [^;,]*", "", answer.err)  # a whole command names its own options
        said = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*\b", own_words))
        typed = set(re.findall(r"--[a-z][a-z-]*\b", " ".join(argv)))
        assert said <= options_of(verb) | typed | {"--help"}, case


def verb_of(argv: Sequence[str]) -> str | None:
    """Of two words where there is one."""
    return next((verb for verb in (" ".join(argv[:2]), *argv[:1]) if verb in app.VERBS), None)


def options_of(verb: str) -> set[str]:
    """The options of a verb, as a person types them."""
    command = app.Verbs().get_command(typer.Context, verb)  # type: ignore[arg-type]
    return {option for parameter in command.params for option in (*parameter.opts, option_name(parameter))}


def needed(verb: str) -> list[str]:
    """A value for each option that a verb is not called without."""
    command = app.Verbs().get_command(typer.Context, verb)  # type: ignore[arg-type]
    own = [str(parameter.opts[0]) for parameter in command.params if parameter.required]
    return [word for option in own if option.startswith("--") for word in (option, "1")]


def takes_no_value(option: str, verb: str) -> bool:
    """Whether it is typed alone."""
    command = app.Verbs().get_command(typer.Context, verb)  # type: ignore[arg-type]
    return any(option in parameter.opts and getattr(parameter, "is_flag", False) for parameter in command.params)


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise TooLongError

    before = {number: signal.signal(number, late) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
