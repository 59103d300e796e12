"""The run directory: where it is, what it is called, who measures in it, and the file that says what was asked."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from trtx.bench import LoadSpec
from trtx.bench.documents import RESTORE, plain
from trtx.bench.intact import refuse_changed_documents
from trtx.bench.load_field import field_records
from trtx.config.media import MediaLimits
from trtx.config.wording import quoted
from trtx.errors import LoadGeneratorError, UsageError
from trtx.experiment.bench.spec import ExperimentSpec
from trtx.launch import write_problem
from trtx.runs.forms import LOCK, PLAN, Provenance
from trtx.tls import CA_VARIABLE

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PROVENANCE = "provenance"  # the field of the lock that no sweep has
# Fields of topology.media that came with version 7: workers before it took no videos.
MEDIA_CAME_WITH, BEFORE_VIDEOS = 7, {"max_videos": 0, "max_video_frames": 32, "max_video_s": 600.0}
# Fields of a sweep that came later -> the version of the lock, and what the runs before it did. "" is its top.
CAME_WITH: Mapping[tuple[str, str], tuple[int, Any]] = {
    ("gate", "window"): (3, "whole"),
    ("", "eval"): (4, None),
    ("topology", "encode"): (5, 0),
    ("topology", "encode_shared"): (8, 0),
    ("attach", "etcd"): (7, []),
    ("attach", "etcd_auth"): (7, None),
    ("topology", "media"): (5, MediaLimits().model_dump(mode="json") | BEFORE_VIDEOS),
    ("topology", "tls_cert"): (7, None),
    ("topology", "tls_key"): (7, None),
    ("topology", "deterministic"): (8, False),
    **{("load", name): (record.since, record.before) for name, record in field_records(LoadSpec).items()},
}


_ANSWERS = ("eval/", "fidelity/")  # samples and passes that a resumed run keeps
Asking = ParamSpec("Asking")
Ended = TypeVar("Ended")


class Asked(Protocol):
    """What a run is asked to do."""

    @property
    def name(self) -> str: ...

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        ...


def create(parent: Path, spec: Asked, started_at: datetime) -> Path:
    """Makes ``<parent>/<utc>-<name>-<hash8>``, which did not exist; the hash is of what was asked. Or UsageError."""
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
            f"no run directory can be made in {str(parent)!r} ({error.strerror}); "
            "expected a directory that you can write to; name another with -o"
        ) from error


def write_lock(run_dir: Path, spec: Asked, provenance: Provenance) -> None:
    """``run.lock.yaml``: the spec after defaults, the loads that it led to, and what all of it was asked of."""
    asked = spec.to_json()
    directory = str(Path.cwd()) if any(_relative_paths(asked)) else None
    LOCK.write(run_dir, {**asked, PROVENANCE: plain(replace(provenance, directory=directory))})


def _relative_paths(asked: Any) -> Iterator[str]:
    """Texts in what was asked that lead to something from here and would not from elsewhere. What is kept at the end
    of the run (``baseline_dir``) need not be there yet."""
    if isinstance(asked, dict):
        if asked.get("save_baseline") is not None and not Path(asked["baseline_dir"]).is_absolute():
            yield str(asked["baseline_dir"])
        asked = asked.values()
    if isinstance(asked, str):
        with contextlib.suppress(OSError, ValueError):  # no path: too long, or with a zero in it
            parts = (asked, asked.partition("=")[2])
            yield from (one for one in parts if one and not os.path.isabs(one) and Path(one).exists())  # noqa: PTH117
    elif isinstance(asked, Iterable):
        for one in asked:
            yield from _relative_paths(one)


@contextlib.contextmanager
def where_it_began(lock: Path, *, is_copy: bool = False) -> Iterator[None]:
    """Inside, relative paths mean what they meant as the run of ``lock`` began: its file, or its run directory.

    They stand in the lock as they were typed, since baselines are compared by them. Raises UsageError where that
    directory is gone; ``is_copy``: the lock may be of another machine, and they begin here then.
    """
    lock = lock / LOCK.file if lock.is_dir() else lock
    told = LOCK.load_file(lock).get(PROVENANCE) if lock.exists() else None  # without one, the verb says that it is none
    began = told.get("directory") if isinstance(told, dict) else None
    if not isinstance(began, str) or Path(began) == Path.cwd() or (is_copy and not Path(began).is_dir()):
        yield
        return
    if not Path(began).is_dir():
        raise UsageError(
            f"{lock} began in {quoted(began)}, where its relative paths are looked up, and that is no directory now; "
            "put it back, or start a new run with absolute paths"
        )
    authorities = os.environ.get(CA_VARIABLE)  # of this call: it is no part of the run
    if authorities:
        os.environ[CA_VARIABLE] = str(Path(authorities).absolute())
    with contextlib.chdir(began):
        yield


def goes_on(verb: Callable[Concatenate[Path, Asking], Ended]) -> Callable[Concatenate[Path, Asking], Ended]:
    """Of a function that goes on with the run in its first argument: it gets the directory from the root, and is called
    :func:`where_it_began`. Answers that it would keep are those that were given, or UsageError."""

    @functools.wraps(verb)
    def there(run_dir: Path, /, *args: Asking.args, **named: Asking.kwargs) -> Ended:
        run_dir = run_dir.absolute()
        with where_it_began(run_dir):
            refuse_changed_documents(run_dir, under=_ANSWERS)
            return verb(run_dir, *args, **named)

    return there


def read_lock(run_dir: Path) -> ExperimentSpec:
    """The spec of a run. Raises UsageError where ``run_dir`` is none, or its record can't be read, naming the field.

    What a sweep may leave out must stand here: a default in place of a lost field would be another measurement.
    """
    if (run_dir / PLAN.file).exists() and not (run_dir / LOCK.file).exists():  # which is written after it
        raise UsageError(f"{run_dir} ended before anything of it was measured; start the run anew")
    fields = LOCK.load(run_dir)
    if "check" in fields:
        raise UsageError(f"{run_dir} is a run of trtx eval {fields['check']}; go on with it by that verb's --resume")
    if "tasks" in fields:
        raise UsageError(f"{run_dir} is a run of trtx eval; go on with it by trtx eval --resume")
    if "routes" in fields:
        raise UsageError(f"{run_dir} is a run of trtx eval parity; go on with it by trtx eval parity --resume")
    return spec_of(fields, str(run_dir / LOCK.file))


def spec_of(fields: dict[str, Any], source: str) -> ExperimentSpec:
    """What a lock says was asked. ``source``: its path, for messages. Raises UsageError, naming the field."""
    fields = _with_later_fields(fields)
    asked = {name: value for name, value in fields.items() if name not in (PROVENANCE, "topologies")}
    if isinstance(load := asked.get("load"), dict):
        follows = ("cells", "prompts")  # from the rest
        asked["load"] = {name: value for name, value in load.items() if name not in follows}
    spec = LOCK.restored(asked, ExperimentSpec, source)
    if (differing := _difference(fields, spec.to_json())) is not None:
        raise UsageError(f"{source}: {differing}; {RESTORE}")
    return spec


def _with_later_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """A lock of an older version, with what its run did where there was no choice yet."""
    complete = dict(fields)
    for (part, name), (version, value) in CAME_WITH.items():
        if fields["schema_version"] >= version:
            continue
        if not part:
            complete = {name: value, **complete}
        elif isinstance(complete.get(part), dict):
            complete[part] = {name: value, **complete[part]}
        if part == "topology" and isinstance(arms := complete.get("arms"), dict):  # each says all of its topology
            complete["arms"] = {
                label: {name: value, **arm} if isinstance(arm, dict) else arm for label, arm in arms.items()
            }
    if fields["schema_version"] < MEDIA_CAME_WITH:
        complete = _with_videos(complete)
    return complete


def _with_videos(fields: dict[str, Any]) -> dict[str, Any]:
    """With the fields of videos in each ``media``, of the topology and of arms."""

    def filled(topology: Any) -> Any:
        media = topology.get("media") if isinstance(topology, dict) else None
        return {**topology, "media": {**BEFORE_VIDEOS, **media}} if isinstance(media, dict) else topology

    complete = dict(fields)
    if "topology" in complete:
        complete["topology"] = filled(complete["topology"])
    if isinstance(arms := complete.get("arms"), dict):
        complete["arms"] = {label: filled(arm) for label, arm in arms.items()}
    return complete


def _difference(found: dict[str, Any], written: dict[str, Any], parent: str = "") -> str | None:
    """The first field in which a record is not what its spec would be written as."""
    for name, value in written.items():
        if name not in found:
            return f"{parent}{name} is missing; expected what was asked, or followed from it"
        if isinstance(value, dict) and isinstance(found[name], dict):
            if (inner := _difference(found[name], value, f"{parent}{name}.")) is not None:
                return inner
        elif found[name] != value:
            return f"{parent}{name} is {quoted(found[name])}; expected {quoted(value)}, which follows from the rest"
    return None


@contextlib.contextmanager
def told_if_unwritable(run_dir: Path) -> Iterator[None]:
    """What fails inside because the run directory is full, read-only or gone becomes a UsageError that says so.

    It is tried: aiperf on a full disk fails in words of its own, and other errors are passed on as they are.
    """
    try:
        yield
    except (OSError, LoadGeneratorError) as error:
        if (reason := write_problem(run_dir) or _no_room(error, run_dir)) is None:
            raise
        if not run_dir.is_dir():
            raise _removed(run_dir) from error
        way_out = "go on with --resume" if (run_dir / LOCK.file).exists() else "run it again, or name another with -o"
        raise UsageError(
            f"run directory {run_dir} can't be written ({reason}), so the run ended; make room there and {way_out}"
        ) from error


def _no_room(error: Exception, run_dir: Path) -> str | None:
    """That a file of ``run_dir`` was too large for what room there is, in the system's words: a report has 5 MB, and a
    smaller file is taken there still."""
    if not isinstance(error, OSError) or error.errno not in _FULL or not isinstance(error.filename, str):
        return None
    return error.strerror if Path(error.filename).is_relative_to(run_dir) else None


def _removed(run_dir: Path) -> UsageError:
    return UsageError(
        f"run directory {run_dir} was removed while it was measured, and what was in it is lost; run it again"
    )


@contextlib.contextmanager
def hold(run_dir: Path) -> Iterator[Callable[[], None]]:
    """Keeps every other trtx out of a run while it is measured. Raises UsageError where one is in it.

    Yields a check that raises UsageError once the run's record is gone, or another is in its place: aiperf 0.13 goes
    on, with its result in files that have no name any more, and the launcher makes its own part of the directory again.

    The kernel lets go of the lock when this process ends, by whatever signal.
    """
    with (run_dir / LOCK.file).open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another trtx measures in {run_dir} now; wait until it has ended") from error

        def check() -> None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if os.path.samestat((run_dir / LOCK.file).stat(), os.fstat(lock.fileno())):
                    return
            raise _removed(run_dir)

        try:
            yield check
        except (OSError, LoadGeneratorError):
            check()  # whatever failed first: it was over that
            raise
