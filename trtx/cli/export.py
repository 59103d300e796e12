"""What the verbs ``trtx export kubernetes``, ``slurm`` and ``nginx`` share: where their files go, and which of the
options of ``trtx serve`` they take. Each is a module of its own, ``export_<target>.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

import typer
from typer.exceptions import TyperException

from trtx.cli.topology_options import OptionGroup, TopologyOptions, split_words
from trtx.errors import UsageError
from trtx.export import ExportedFile, as_one_text, write_files

ExportOutput = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        help="Directory for the files, new or empty. Default: all of them to standard output.",
        rich_help_panel="Output",
        show_default=False,
    ),
]


def topology_group(*names: str) -> OptionGroup:
    """These of the options of :class:`TopologyOptions`; the others belong to the machine that serves."""
    hints = get_type_hints(TopologyOptions, include_extras=True)
    defaults = {field.name: field.default for field in fields(TopologyOptions)}
    members: Mapping[str, tuple[Any, Any]] = {name: (hints[name], defaults[name]) for name in names}
    return OptionGroup(members)


def hand_over(files: Sequence[ExportedFile], output: Path | None, how: str) -> None:
    """Writes or prints ``files``. ``how``: what to do with them next, told where they were written."""
    if output is None:
        typer.echo(as_one_text(files), nl=False)
        return
    write_files(files, output)
    typer.echo(f"Wrote {', '.join(file.name for file in files)} to {output}.\n{how}")


def bench_words(text: str, not_there: Mapping[str, str] = MappingProxyType({})) -> tuple[str, ...]:
    """What ``--bench`` holds: flags of ``trtx bench``, read as the job will, values and files too: a typing
    mistake would end a job once all its workers were loaded.

    ``not_there``: options that mean nothing where the job runs -> why. Raises UsageError for one of them, for one that
    the job gives itself, and for one that ``trtx bench`` refuses beside ``--url``.
    """
    from trtx.cli.command import option_name, typed
    from trtx.cli.placement import ignored_in

    words = split_words("--bench", text)
    if "--help" in words:
        raise UsageError("--bench holds --help, with which the job would measure nothing; leave it out")
    for parameter in typed(_bench_context(words)):
        named = option_name(parameter)
        reason = _OF_THE_JOB.get(named, not_there.get(named))
        if reason is None and "attach" in ignored_in("bench", named):
            reason = "which describes what trtx bench would serve, and the job measures what is served already"
        if reason is not None:
            raise UsageError(f"--bench holds {named}, {reason}; leave it out")
    _check_values(words)
    return words


def _bench_context(words: Sequence[str]) -> typer.Context:
    from trtx.cli.app import Verbs

    command = Verbs().get_command(typer.Context, "bench")
    try:
        context: typer.Context = command.make_context("bench", list(words))
    except TyperException as error:
        problem = error.format_message().strip().rstrip(".").replace("Input should be", "expected")
        raise UsageError(f"--bench: {problem}; see trtx bench --help") from error
    return context


def _check_values(words: Sequence[str]) -> None:
    """As the job's own ``trtx bench`` would, beside the ``--url`` that it is given."""
    from trtx.bench import check_load
    from trtx.cli.bench import asked_of

    try:
        check_load(asked_of(_bench_context(["--url", "http://127.0.0.1:8000", "--model", "model", *words])).load)
    except UsageError as error:
        told = str(error)
        raise UsageError(told if told.startswith("--bench: ") else f"--bench: {told}") from error


_OF_THE_JOB = {
    **dict.fromkeys(("--url", "--model", "--tokenizer", "--gpu-count", "--output"), "which the job gives by itself"),
    "--dry-run": "with which the job would measure nothing",
}
