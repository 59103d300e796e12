"""The ``trtx`` command. Each verb's module is imported when the verb is called."""

from __future__ import annotations

import difflib
import functools
import importlib
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from trtx.cli.exit_codes import exit_code_of
from trtx.cli.streams import drop_what_is_left, prepare_streams
from trtx.errors import UsageError

# verb (one or two words) -> (module with a Typer app named ``app``, its line in `trtx --help`)
VERBS = {
    "serve": ("trtx.cli.serve", "Serve a model: a frontend and the workers of a topology."),
    "serve join": ("trtx.cli.join", "Run this host's share of a topology that another host planned."),
    "sleep": ("trtx.cli.sleep", "Give back the GPU memory of a served topology, which keeps its processes."),
    "wake": ("trtx.cli.wake", "Wake a topology that trtx sleep has put to sleep."),
    "update": ("trtx.cli.update", "Replace the weights of a served topology in place, without a restart."),
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
    "export prometheus": (
        "trtx.cli.export_prometheus",
        "Write Prometheus' scrape file and rules for served topologies.",
    ),
    "export grafana": ("trtx.cli.export_grafana", "Write a Grafana dashboard for served topologies."),
    "compare": ("trtx.cli.compare", "Compare runs or baselines: ratios, intervals, which conditions differ."),
    "baseline": ("trtx.cli.baseline", "List, show, save, promote and expire baselines."),
    "report": ("trtx.cli.report", "Render a run directory again."),
    "explain": ("trtx.cli.explain", "Say where the time of a run's requests went, and why they were slow."),
    "doctor": ("trtx.cli.doctor", "Check this machine: driver, GPUs, packages, limits, leftovers."),
}


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
                f"trtx {args[0]} is not a verb by itself; expected one of {', '.join(seconds)} after it, such as "
                f"trtx {args[0]} {seconds[0]} --help"
            )
        close = [] if args[0] in VERBS or ctx.resilient_parsing else difflib.get_close_matches(args[0], VERBS, n=1)
        if close:
            raise UsageError(f"trtx {args[0]} is no verb; did you mean trtx {close[0]}?")
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
    """Runs one command line and returns its exit code."""

    def verb() -> object:
        for number, argument in enumerate(argv, start=1):
            if "\0" in argument or not _is_text(argument):
                raise UsageError(f"argument {number} holds a NUL byte or bytes that are no UTF-8; expected text")
        return app(args=argv, prog_name="trtx", standalone_mode=False)

    return exit_code_of(verb)


def _is_text(argument: str) -> bool:
    """Returns whether an argument was valid UTF-8; Python turns invalid bytes into lone surrogates."""
    try:
        argument.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
