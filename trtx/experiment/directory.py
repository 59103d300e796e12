"""The run directory: its location, name and lock, and the run manifest."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_args, get_origin

from pydantic import BaseModel

from trtx.bench.documents import RESTORE, plain
from trtx.bench.journal import JOURNAL
from trtx.config.option_field import OptionField, record_of, value_before
from trtx.config.wording import quoted
from trtx.errors import LoadGeneratorError, UsageError
from trtx.experiment.bench.axes import NamedTopology
from trtx.experiment.bench.spec import Attach, ExperimentSpec
from trtx.launch import write_problem
from trtx.runs.forms import LOCK, PLAN, Provenance
from trtx.tls import CA_VARIABLE

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
Kind = TypeVar("Kind", bound=BaseModel)
PROVENANCE = "provenance"  # the only top-level field of the manifest that isn't part of a sweep


class RunSpec(Protocol):
    """What the specifications of all runs have in common."""

    @property
    def name(self) -> str: ...
    @property
    def attach(self) -> Attach | None: ...
    @property
    def topologies(self) -> tuple[NamedTopology, ...]:
        """The topologies that trtx serves in turn."""
        ...

    def to_json(self) -> dict[str, Any]:
        """The specification as plain values."""
        ...


def create(parent: Path, spec: RunSpec, started_at: datetime) -> Path:
    """Creates the new directory ``<parent>/<utc>-<name>-<hash8>``, with a hash of the specification. Raises
    UsageError.
    """
    digest = hashlib.sha256(json.dumps(spec.to_json(), sort_keys=True).encode()).hexdigest()[:8]
    base = f"{started_at.astimezone(UTC):%Y%m%dT%H%M%SZ}-{spec.name}-{digest}"
    attempt = 1
    try:
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            path = parent / (base if attempt == 1 else f"{base}-{attempt}")
            try:
                path.mkdir()
            except FileExistsError:
                attempt += 1
            else:
                return path.absolute()
    except OSError as error:
        raise UsageError(
            f"no run directory can be created in {str(parent)!r} ({error.strerror}); "
            "choose a directory that you can write to with -o"
        ) from error


def write_lock(run_dir: Path, spec: RunSpec, provenance: Provenance) -> None:
    """Writes ``run.lock.yaml``: the spec after defaults, the resulting loads, and the provenance."""
    asked = spec.to_json()
    directory = str(Path.cwd()) if any(_relative_paths(asked)) else None
    written = replace(provenance, directory=directory, fields_sha256=_names_digest(asked))
    LOCK.write(run_dir, {**asked, PROVENANCE: plain(written)})


def _names_digest(asked: Mapping[str, Any]) -> str:
    """A digest of the names of all fields in the specification, so that a reader notices if one was lost."""

    def names(value: Any, parent: str) -> Iterator[str]:
        for name, inner in value.items() if isinstance(value, dict) else ():
            yield f"{parent}{name}"
            yield from names(inner, f"{parent}{name}.")

    return hashlib.sha256("\n".join(sorted(names(asked, ""))).encode()).hexdigest()


def _relative_paths(asked: Any) -> Iterator[str]:
    """Relative paths in the specification that exist from the current directory.

    ``baseline_dir``, which is used at the end of the run, need not exist yet.
    """
    if isinstance(asked, dict):
        if asked.get("save_baseline") is not None and not Path(asked["baseline_dir"]).is_absolute():
            yield str(asked["baseline_dir"])
        asked = asked.values()
    if isinstance(asked, str):
        with contextlib.suppress(OSError, ValueError):  # not a path: too long, or with a NUL
            parts = (asked, asked.partition("=")[2])
            yield from (one for one in parts if one and not os.path.isabs(one) and Path(one).exists())  # noqa: PTH117
    elif isinstance(asked, Iterable):
        for one in asked:
            yield from _relative_paths(one)


@contextlib.contextmanager
def where_it_began(lock: Path, *, is_copy: bool = False) -> Iterator[None]:
    """Changes to the directory in which the run of ``lock`` (its manifest or run directory) was started.

    Relative paths are stored as typed, because baselines are compared by them, so they must be resolved from there.
    Raises UsageError if that directory is gone. With ``is_copy``, the manifest may come from another machine, and paths
    are then resolved from the current directory.
    """
    lock = lock / LOCK.file if lock.is_dir() else lock
    provenance = (
        LOCK.load_file(lock).get(PROVENANCE) if lock.exists() else None
    )  # if it is missing, the command reports that
    began = provenance.get("directory") if isinstance(provenance, dict) else None
    if not isinstance(began, str) or Path(began) == Path.cwd() or (is_copy and not Path(began).is_dir()):
        yield
        return
    if not Path(began).is_dir():
        raise UsageError(
            f"{lock} began in {quoted(began)}, from where its relative paths are resolved, but that directory is gone; "
            "restore it, or start a new run with absolute paths"
        )
    authorities = os.environ.get(CA_VARIABLE)  # belongs to this invocation, not to the run
    if authorities:
        os.environ[CA_VARIABLE] = str(Path(authorities).absolute())
    with contextlib.chdir(began):
        yield


def read_lock(run_dir: Path) -> ExperimentSpec:
    """The spec of a run. Raises UsageError, naming the field, if ``run_dir`` is not a run directory or its manifest is
    invalid.

    Fields that the run's trtx did not have get the value that describes the run. All others are required, including
    those with a default in a sweep file: a default in place of a lost field would change the measurement.
    """
    if (run_dir / PLAN.file).exists() and not (run_dir / LOCK.file).exists():  # the manifest is written after the plan
        raise UsageError(f"{run_dir} ended before anything was measured, so it can't be resumed; start a new run")
    return spec_of(_manifest_of(run_dir, "trtx bench"), str(run_dir / LOCK.file))


def read_manifest(run_dir: Path, verb: str, kind: type[Kind]) -> Kind:
    """Reads the spec of a run of ``verb`` from its manifest. Raises UsageError if it isn't one, or is unreadable."""
    fields = _manifest_of(run_dir, verb)
    asked = {name: value for name, value in fields.items() if name not in (PROVENANCE, "topologies")}
    return LOCK.restored(asked, kind, str(run_dir / LOCK.file))


def _manifest_of(run_dir: Path, verb: str) -> dict[str, Any]:
    if not (run_dir / LOCK.file).exists():
        raise UsageError(f"{run_dir} is not a run directory, because it has no {LOCK.file}; expected one of {verb}")
    fields = LOCK.load(run_dir)
    own = "trtx bench"
    if "check" in fields:
        own = f"trtx eval {fields['check']}"
    elif "routes" in fields:
        own = "trtx eval parity"
    elif "tasks" in fields:
        own = "trtx eval"
    if own != verb:
        raise UsageError(f"{run_dir} is a run of {own}, not of {verb}; resume it with {own} --resume")
    return fields


def spec_of(fields: dict[str, Any], source: str) -> ExperimentSpec:
    """The spec in a manifest's fields. ``source`` is its path, for messages. Raises UsageError that names the field."""
    fields = _with_later_fields(fields)
    asked = {name: value for name, value in fields.items() if name not in (PROVENANCE, "topologies")}
    if isinstance(load := asked.get("load"), dict):
        follows = ("cells", "prompts")  # derived values
        asked["load"] = {name: value for name, value in load.items() if name not in follows}
    spec = LOCK.restored(asked, ExperimentSpec, source)
    if (differing := _difference(fields, spec.to_json())) is not None:
        raise UsageError(f"{source}: {differing}; {RESTORE}")
    return spec


def _with_later_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Completes the manifest of an older trtx with the values that its run used implicitly.

    Up to version 9, the version tells which fields it had. Later, a field may be missing only if the manifest still has
    exactly the fields with which it was written.
    """
    version = fields["schema_version"]
    follows = ("schema_version", PROVENANCE)
    provenance = fields.get(PROVENANCE)
    digest = provenance.get("fields_sha256") if isinstance(provenance, dict) else None
    is_whole = digest == _names_digest({name: value for name, value in fields.items() if name not in follows})
    return _completed(
        fields, ExperimentSpec, lambda record: is_whole or (record is not None and record.since > version)
    )


def _completed(
    found: dict[str, Any], model: type[BaseModel], is_later: Callable[[OptionField | None], bool]
) -> dict[str, Any]:
    """``found`` with the fields of ``model`` that it lacks, if ``is_later`` says that its trtx did not have them."""
    complete = dict(found)
    for name, field in model.model_fields.items():
        is_new = name not in found
        if is_new and is_later(record_of(field)):
            complete[name] = value_before(field)
        inner = _model_in(field.annotation)
        if inner is None or not isinstance(value := complete.get(name), dict):
            continue
        has_labels = get_origin(field.annotation) is dict  # such as arms, each with its whole topology
        if is_new:
            complete[name] = _completed({}, inner, lambda record: True) if not has_labels else value
        elif has_labels:
            complete[name] = {
                label: _completed(one, inner, is_later) if isinstance(one, dict) else one
                for label, one in value.items()
            }
        else:
            complete[name] = _completed(value, inner, is_later)
    return complete


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in an annotation such as ``TopologySpec``, ``Attach | None`` or ``dict[str, TopologySpec]``."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation if issubclass(annotation, BaseModel) else None
    return next((model for one in get_args(annotation) if (model := _model_in(one)) is not None), None)


def _difference(found: dict[str, Any], written: dict[str, Any], parent: str = "") -> str | None:
    """The first field in which a manifest differs from what its spec would be written as; None if they agree."""
    for name, value in written.items():
        if name not in found:
            return f"{parent}{name} is missing; expected the given or derived value"
        if isinstance(value, dict) and isinstance(found[name], dict):
            if (inner := _difference(found[name], value, f"{parent}{name}.")) is not None:
                return inner
        elif found[name] != value:
            return f"{parent}{name} is {quoted(found[name])}; expected {quoted(value)}, which follows from the rest"
    return None


@contextlib.contextmanager
def unwritable_refused(run_dir: Path) -> Iterator[None]:
    """Converts exceptions of the block that a full, read-only or removed run directory has caused into a UsageError.

    The directory is tested by writing, since aiperf's messages for a full disk vary. Other errors are re-raised
    unchanged.
    """
    try:
        yield
    except (OSError, LoadGeneratorError) as error:
        if (reason := write_problem(run_dir) or _no_room(error, run_dir)) is None:
            raise
        if not run_dir.is_dir():
            raise _removed(run_dir) from error
        way_out = (
            "continue the run with --resume"
            if (run_dir / JOURNAL.file).exists()
            else "run it again, or name another with -o"
        )
        raise UsageError(
            f"run directory {run_dir} can't be written ({reason}), so the run ended; make room there and {way_out}"
        ) from error


def _no_room(error: Exception, run_dir: Path) -> str | None:
    """The system's message if a file in ``run_dir`` didn't fit on the disk, else None.

    This covers large files such as a report (5 MB), when the write test with a small file still succeeds.
    """
    if not isinstance(error, OSError) or error.errno not in _FULL or not isinstance(error.filename, str):
        return None
    return error.strerror if Path(error.filename).is_relative_to(run_dir) else None


def _removed(run_dir: Path) -> UsageError:
    return UsageError(
        f"run directory {run_dir} was removed during the measurement, so its results are lost; run it again"
    )


@contextlib.contextmanager
def hold(run_dir: Path) -> Iterator[Callable[[], None]]:
    """Locks a run directory while the run is in progress. Raises UsageError if another trtx holds it.

    Yields a function that raises UsageError once the manifest has been removed or replaced. Without this check, aiperf
    0.13.0 would continue to write into deleted files, and the launcher would recreate its part of the directory.

    The kernel releases the lock when this process ends, whatever the signal.
    """
    with (run_dir / LOCK.file).open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another trtx measures in {run_dir} at the moment; wait until it has ended") from error

        def check() -> None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if os.path.samestat((run_dir / LOCK.file).stat(), os.fstat(lock.fileno())):
                    return
            raise _removed(run_dir)

        try:
            yield check
        except (OSError, LoadGeneratorError):
            check()  # a removed directory is the cause, so report it instead
            raise
