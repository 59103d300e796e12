from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from examples import first_of

pytestmark = pytest.mark.slow


def trtx(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "trtx", *arguments], capture_output=True, text=True, timeout=60)


def test_help_lists_the_verbs() -> None:
    shown = trtx("--help")
    assert shown.returncode == 0
    assert "serve" in shown.stdout
    assert "bench" in shown.stdout


def test_no_arguments_show_the_help() -> None:
    shown = trtx()
    assert "Usage" in shown.stdout + shown.stderr


@pytest.mark.parametrize(
    "arguments", first_of(1, [["serve", "--no-such-flag"], ["srve"], ["bench", "--concurrency", "a,b"]])
)
def test_a_wrong_word_is_one_sentence_and_exit_2(arguments: list[str]) -> None:
    refused = trtx(*arguments)
    assert refused.returncode == 2, refused.stderr
    assert "Traceback" not in refused.stderr
    assert arguments[-1] in refused.stderr


def test_a_word_that_is_nearly_a_verb_names_the_verb() -> None:
    assert trtx("serv", "--model", "x").stderr.strip() == "trtx: trtx serv is no verb; did you mean trtx serve?"


@pytest.mark.parametrize("arguments", first_of(1, [["doctor", "--port", "0"], ["bench", "--help"], ["no-such-verb"]]))
def test_a_reader_that_goes_away_is_what_a_shell_calls_sigpipe(arguments: list[str]) -> None:
    """Whatever is written is written to nobody: both streams are a pipe whose other end is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([sys.executable, "-m", "trtx", *arguments], stdout=writer, stderr=writer, timeout=60)
    finally:
        os.close(writer)
    assert done.returncode == 141


@pytest.mark.parametrize(("arguments", "says"), [("--help", "standard output can't be written"), ("no-such-verb", "")])
def test_what_cannot_be_written_is_one_sentence_and_exit_2(arguments: str, says: str) -> None:
    with open("/dev/full", "wb") as full:  # noqa: PTH123 -- a device
        told = subprocess.run(
            [sys.executable, "-m", "trtx", arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
        untold = subprocess.run([sys.executable, "-m", "trtx", arguments], stdout=full, stderr=full, timeout=60)
    assert says in told.stderr
    assert "Traceback" not in told.stderr
    assert (told.returncode, untold.returncode) == (2, 2)


def test_a_closed_output_is_nobody_to_write_to() -> None:
    done = subprocess.run(["bash", "-c", 'exec "$0" -m trtx --help >&- 2>&-', sys.executable], timeout=60, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("module", ["typer", "pydantic", "trtx.cli.serve", "trtx.launch"])
def test_ctrl_c_while_it_is_imported_is_130_without_a_traceback(module: str) -> None:
    program = f"""
        import os, signal, sys
        class Interrupts:
            def find_spec(self, name, path=None, target=None):
                if name == {module!r}:
                    os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Interrupts())
        sys.argv = ["trtx", "serve", "--engine", "paced", "--dry-run"]
        from trtx.__main__ import main
        main()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
