"""``trtx``: the verbs, loaded when they are called."""

from __future__ import annotations

import importlib
import sys
import traceback

from trtx.errors import TrtxError

# verb -> (module with a Typer app named ``app``, the line that `trtx --help` shows)
VERBS = {
    "serve": ("trtx.cli.serve", "Launch a frontend and the workers of a topology, and watch them."),
    "bench": ("trtx.cli.bench", "Sweep a served topology with aiperf and render a report."),
}

_HELP = """\
Usage: trtx VERB [OPTIONS]

Takes a model checkpoint to a measured, served topology on the GPUs of one
machine: NVIDIA TensorRT-LLM, or the embedded torch engine, on NVIDIA Dynamo.

Verbs:
{verbs}

Options:
  --version  Show the version and exit.
  --help     Show this message and exit.

Try:
  trtx serve --mode agg
  trtx serve --mode disagg --prefill 1 --decode 1 --dry-run
  trtx bench --mode agg,disagg --concurrency 1,8,64
"""


def main() -> None:
    """Entry point of the ``trtx`` command. The one place that turns errors into exit codes."""
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Runs one command line and returns its exit code."""
    if not argv or argv[0] in ("--help", "-h", "help"):
        print(_HELP.format(verbs="\n".join(f"  {verb:<10} {line}" for verb, (_, line) in VERBS.items())), end="")
        return 0
    if argv[0] in ("--version", "version"):
        from trtx import __version__

        print(f"trtx {__version__}")
        return 0
    verb, *rest = argv
    if verb not in VERBS:
        return _complain(f"{verb!r} is not a verb of trtx; expected {' or '.join(VERBS)}; see trtx --help", 2)
    try:
        return _run_verb(verb, rest)
    except TrtxError as error:
        return _complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except BrokenPipeError:
        return 141  # the reader went away, as in `trtx … | head`: what a shell reports for SIGPIPE
    except Exception:
        traceback.print_exc()
        return _complain("this is a bug of trtx; please report the lines above", 70)


def _run_verb(verb: str, argv: list[str]) -> int:
    import typer

    command = typer.main.get_command(importlib.import_module(VERBS[verb][0]).app)
    # standalone: Typer prints its own usage errors and leaves with 2; our errors pass through to run().
    try:
        command.main(args=argv, prog_name=f"trtx {verb}", standalone_mode=True)
    except SystemExit as exit_request:
        return exit_request.code if isinstance(exit_request.code, int) else 0 if exit_request.code is None else 1
    return 0


def _complain(message: str, exit_code: int) -> int:
    print(f"trtx: {message}", file=sys.stderr)
    return exit_code
