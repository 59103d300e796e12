"""The ``trtx`` command. Each verb's module is imported when the verb is called."""

from __future__ import annotations

import functools
import importlib
import sys
import traceback
from typing import Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from trtx.cli.sentences import tell
from trtx.cli.streams import drop_what_is_left, prepare_streams
from trtx.config.findings import LIST_ITEM
from trtx.config.wording import printable
from trtx.errors import TrtxError, UsageError

# verb (one or two words) -> (module with a Typer app named ``app``, its line in `trtx --help`)
VERBS = {
    "serve": ("trtx.cli.serve", "Serve a model: a frontend and the workers of a topology."),
    "serve join": ("trtx.cli.join", "Run this host's share of a topology that was planned on another."),
    "build": ("trtx.cli.build", "Build a model: quantize it, resolve and check its engine configs, prove it."),
    "bench": ("trtx.cli.bench", "Sweep a served topology with aiperf and render a report."),
    "bench ab": ("trtx.cli.ab", "Measure two topologies in turn on the same GPUs, restarted each round."),
    "bench reproduce": ("trtx.cli.reproduce", "Repeat a run from its lock, after listing what differs here."),
    "eval": ("trtx.cli.eval", "Score the answers of a served topology with lm-eval."),
    "eval fidelity": ("trtx.cli.fidelity", "Compare a served engine with the checkpoint's own precision."),
    "eval parity": ("trtx.cli.parity", "Send the same prompts through several routes of one model, and compare."),
    "export kubernetes": (
        "trtx.cli.export_kubernetes",
        "Write a topology as manifests: for Dynamo's operator, or without it.",
    ),
    "export slurm": ("trtx.cli.export_slurm", "Write a topology as one batch file: Slurm places and starts it."),
    "export nginx": ("trtx.cli.export_nginx", "Write nginx's configuration for a topology's frontends."),
    "compare": ("trtx.cli.compare", "Compare runs or baselines: ratios, intervals, which conditions differ."),
    "baseline": ("trtx.cli.baseline", "List, show, save, promote and expire baselines."),
    "report": ("trtx.cli.report", "Render a run directory again."),
    "doctor": ("trtx.cli.doctor", "Check this machine: driver, GPUs, packages, limits, leftovers."),
}

LONGEST_MESSAGE = 1000
"""The maximum length of a usage error in characters; a longer message loses its middle."""
READER_GONE = 141  # the code that a shell reports for SIGPIPE, when the reader has exited, as in `trtx … | head`


class Verbs(TyperGroup):
    """A group that imports a command's module when it is called. Listings use the lines in ``VERBS``."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the verbs of one word, which shell completion offers."""
        return [verb for verb in VERBS if " " not in verb]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        return _command(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Resolves a verb. A verb of two words takes precedence over the verb that is its first word."""
        if (verb := " ".join(args[:2])) in VERBS and len(args) > 1:
            return verb, self.get_command(ctx, verb), args[2:]
        if args[0] not in VERBS and (seconds := [two.split()[1] for two in VERBS if two.startswith(f"{args[0]} ")]):
            raise UsageError(
                f"trtx {args[0]} is no verb by itself; expected one of {', '.join(seconds)} after it, such as "
                f"trtx {args[0]} {seconds[0]} --help"
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, line) for verb, (_, line) in VERBS.items()])


@functools.cache  # Typer builds the command from signatures and type hints, which takes time
def _command(verb: str) -> Any:
    return typer.main.get_command(importlib.import_module(VERBS[verb][0]).app)


app = typer.Typer(
    cls=Verbs,
    name="trtx",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    subcommand_metavar="VERB [ARGS]...",
    rich_markup_mode=None,  # Rich's panels would add 0.3 s to `trtx --help` (Typer 0.29)
    epilog="Try: trtx bench --mode agg,disagg --concurrency 1,8,64",
)


def _show_version(value: bool) -> None:
    if value:
        from trtx import __version__

        typer.echo(f"trtx {__version__}")
        raise typer.Exit


@app.callback()
def _trtx(
    version: bool = typer.Option(False, "--version", help="Show the version and exit.", callback=_show_version),
) -> None:
    """Take a model checkpoint to a measured, served topology on this machine's GPUs.

    NVIDIA TensorRT-LLM, or the embedded torch engine, on NVIDIA Dynamo.
    """


def main() -> None:
    """Entry point of the ``trtx`` command."""
    prepare_streams()
    exit_code = run(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        drop_what_is_left(stream)
    sys.exit(exit_code)


def run(argv: list[str]) -> int:
    """Runs one command line and returns its exit code. Only this function turns errors into exit codes."""
    try:
        return _run(argv)
    except BrokenPipeError:  # the reader exited while the error was being printed
        return READER_GONE


def _run(argv: list[str]) -> int:
    try:
        for number, argument in enumerate(argv, start=1):
            if "\0" in argument or not _is_text(argument):
                raise UsageError(f"argument {number} holds a NUL byte or bytes that are no UTF-8; expected text")
        code = app(args=argv, prog_name="trtx", standalone_mode=False)
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


def _is_text(argument: str) -> bool:
    """Returns whether an argument was valid UTF-8; Python turns invalid bytes into lone surrogates."""
    try:
        argument.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
