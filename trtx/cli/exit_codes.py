"""Turns errors into exit codes, and prints their messages. Nothing else in trtx does."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from typer.exceptions import TyperException

from trtx.cli.sentences import tell
from trtx.config.wording import LIST_ITEM, printable
from trtx.errors import TrtxError, UsageError

LONGEST_MESSAGE = 1000
"""The maximum length of a usage error in characters; a longer message loses its middle."""
READER_GONE = 141  # the code that a shell reports for SIGPIPE, when the reader has exited, as in `trtx … | head`


def exit_code_of(verb: Callable[[], object]) -> int:
    """Calls ``verb`` and returns the process's exit code: the number that it returns, or the code of its error.

    Each class of :mod:`trtx.errors` has a code. Any other exception is a bug, with its traceback.
    """
    try:
        return _exit_code(verb)
    except BrokenPipeError:  # the reader exited while the error was being printed
        return READER_GONE


def _exit_code(verb: Callable[[], object]) -> int:
    try:
        code = verb()
        return code if isinstance(code, int) else 0
    except TyperException as error:
        return _refuse(error)
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):
            return READER_GONE  # Typer 0.29 and Rich 14.1 turn a broken pipe into an exit code of their own
        return leaving.code if isinstance(leaving.code, int) else 1 if leaving.code else 0
    except TrtxError as error:
        return _complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except BrokenPipeError:
        return READER_GONE
    except Exception:
        traceback.print_exc()
        return _complain("this is a bug of trtx; please report the lines above", 70)


def _refuse(error: TyperException) -> int:
    """Prints Typer's own error in one sentence, or the help of a verb without arguments; returns the exit code."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message(), file=sys.stderr)
        return error.exit_code
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "trtx"
    message = error.format_message().strip().rstrip(".").replace("Value error, ", "")
    message = message.replace("Input should be", "expected")  # pydantic's wording inside a message of Typer 0.29
    return _complain(f"{message}; see {path} --help", error.exit_code)


def _complain(message: str, exit_code: int) -> int:
    """Prints an error and returns the exit code.

    A usage error becomes one line, except that a list of findings keeps one line per finding. Any other error keeps its
    lines, because it may end with the last lines of a log. Control characters are escaped.
    """
    is_usage = exit_code == UsageError.exit_code
    line_end = LIST_ITEM if is_usage else "\n"
    text = line_end.join(printable(line) for line in message.split(line_end))
    if is_usage and len(text) > LONGEST_MESSAGE - len("trtx: \n"):
        half = LONGEST_MESSAGE // 2 - 20
        text = f"{text[:half]} ... {text[-half:]}"
    tell(f"trtx: {text}")
    return exit_code
