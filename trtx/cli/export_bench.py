"""Parses ``--bench`` of ``trtx export slurm`` and ``kubernetes``: the ``trtx bench`` flags that the job will use.

Flags, values and files are validated now, in the same way as by the job's own ``trtx bench``. Otherwise a mistake would
end the job only after all its workers have loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import typer
from typer.exceptions import TyperException

from trtx.cli.topology_options import split_words
from trtx.errors import UsageError

if TYPE_CHECKING:
    from trtx.experiment import ExperimentSpec
    from trtx.export.outcome import ExportedService


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The benchmark of a job.

    ``words``: the arguments of ``trtx bench``, valid in any working directory. ``files``: the absolute paths that it
    reads.
    """

    words: tuple[str, ...]
    files: tuple[Path, ...]
    spec: ExperimentSpec

    def check_fits(self, served: ExportedService) -> None:
        """Raises UsageError if a request of the benchmark exceeds the context of the exported topology."""
        from trtx.experiment import check_fits_served

        try:
            check_fits_served(served, served.checkpoint, self.spec.load)
        except UsageError as error:
            raise UsageError(f"--bench: {error}") from error


def read_bench(text: str, not_there: Mapping[str, str] = MappingProxyType({})) -> Benchmark:
    """Parses the value of ``--bench``.

    ``not_there``: maps options that have no effect in the job to the reason. Raises UsageError for these options, for
    options that the job sets itself, and for options and values that ``trtx bench --url`` refuses.
    """
    from trtx.cli.command import typed
    from trtx.cli.placement import uses_that_ignore
    from trtx.cli.verb_help import option_name

    words = split_words("--bench", text)
    if "--help" in words:
        raise UsageError("--bench holds --help, with which the job would measure nothing; leave it out")
    for parameter in typed(_context(words)):
        named = option_name(parameter)
        reason = _OF_THE_JOB.get(named, not_there.get(named))
        if reason is None and "attach" in uses_that_ignore("bench", named):
            reason = "which describes what trtx bench would serve, and the job measures what is served already"
        if reason is not None:
            raise UsageError(f"--bench holds {named}, {reason}; leave it out")
    spec = _asked(words)
    paths = _paths(spec, words)
    return Benchmark(_with_paths(words, paths), tuple(path for path in paths.values() if path.exists()), spec)


def _context(words: Sequence[str]) -> typer.Context:
    from trtx.cli.app import Verbs

    command = Verbs().get_command(typer.Context, "bench")
    try:
        context: typer.Context = command.make_context("bench", list(words))
    except TyperException as error:
        problem = error.format_message().strip().rstrip(".").replace("Input should be", "expected")
        raise UsageError(f"--bench: {problem}; see trtx bench --help") from error
    return context


def _asked(words: Sequence[str]) -> ExperimentSpec:
    """Parses the arguments as the job's own ``trtx bench`` will, together with the ``--url`` that the job passes."""
    from trtx.bench import check_load
    from trtx.cli.bench import asked_of
    from trtx.experiment import check_elsewhere

    try:
        spec = asked_of(_context(["--url", "http://127.0.0.1:8000", "--model", "model", *words]))
        for field in ("tokenizer", "gpu_count", "etcd", "etcd_auth"):
            if spec.attach is not None and getattr(spec.attach, field):
                raise UsageError(f"attach.{field} of the sweep describes what others serve, and the job knows; drop it")
        check_load(spec.load)
        check_elsewhere(spec)
    except UsageError as error:
        told = str(error)
        raise UsageError(told if told.startswith("--bench: ") else f"--bench: {told}") from error
    return spec


def _paths(spec: ExperimentSpec, words: Sequence[str]) -> dict[str, Path]:
    """Returns the absolute paths of the benchmark's input files and of its baseline directory, by option.

    They are absolute because the job runs in the directory of its submission, which may not be the current one.
    """
    given = _context(words).params
    paths: dict[str, Path | None] = {
        "--sweep": given["sweep"] or given["sweep_file"],
        "--input-file": spec.load.input_file,
    }
    gate = spec.gate
    if gate.baseline is not None and Path(gate.baseline).exists():
        paths["--baseline"] = Path(gate.baseline)
    elif gate.baseline is not None:
        paths["--baseline-dir"] = Path(gate.baseline_dir)
    if gate.save_baseline is not None:
        paths["--baseline-dir"] = Path(gate.baseline_dir)
    return {option: path.absolute() for option, path in paths.items() if path is not None}


def _with_paths(words: Sequence[str], paths: Mapping[str, Path]) -> tuple[str, ...]:
    """Returns ``words`` with the values of the options in ``paths`` replaced."""
    kept: list[str] = []
    rest = iter(_without_argument(words))
    for word in rest:
        option, equals, _ = word.partition("=")
        if option not in paths:
            kept.append(word)
        elif not equals:
            next(rest)
    return (*kept, *(part for option, path in paths.items() for part in (option, str(path))))


def _without_argument(words: Sequence[str]) -> Sequence[str]:
    """Returns ``words`` without the positional sweep file: the word whose removal changes no other parameter."""
    params = _context(words).params
    file = params["sweep_file"]
    for place, word in enumerate(words if file is not None else ()):
        others = [*words[:place], *words[place + 1 :]]
        try:
            if Path(word) == file and _context(others).params == {**params, "sweep_file": None}:
                return others
        except UsageError:  # the word is the value of the option before it
            continue
    return words


_OF_THE_JOB = {
    **dict.fromkeys(("--url", "--model", "--tokenizer", "--gpu-count", "--output"), "which the job gives by itself"),
    **dict.fromkeys(("--etcd", "--etcd-auth"), "and the job's frontends tell of its workers"),
    "--dry-run": "with which the job would measure nothing",
}
