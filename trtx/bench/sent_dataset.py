"""The load as aiperf gets it: an ``input_file`` under aiperf's name of its form, or a copy in a form that it reads."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from trtx.bench.datasets import Dataset, read_dataset, write_records
from trtx.bench.load import LoadSpec, Target

_COPIES = "datasets"  # in a run's directory


def dataset_of(spec: LoadSpec) -> Dataset | None:
    """What the ``input_file`` holds, every record of it checked; None without one. Raises UsageError."""
    if (file := spec.input_file) is None:
        return None
    status = file.stat()
    seen = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, Path.cwd())  # media are relative to it
    return _read(file, spec.custom_dataset_type, spec.fixed_schedule, seen)


def as_sent(spec: LoadSpec, run_dir: Path, topology: str) -> LoadSpec:
    """The load whose command line is aiperf's. Its copy is there once :func:`prepare_dataset` has made it."""
    dataset = dataset_of(spec)
    if dataset is None:
        return spec
    path = _copy(run_dir, topology) if dataset.is_copied else dataset.path
    return spec.model_copy(update={"input_file": path, "custom_dataset_type": dataset.sent_as})


def prepare_dataset(spec: LoadSpec, run_dir: Path, target: Target) -> LoadSpec:
    """:func:`as_sent`, with the copy made where one is needed: once a topology, whose tokenizer its lengths are of."""
    dataset, copy = dataset_of(spec), _copy(run_dir, target.topology)
    if dataset is not None and dataset.is_copied and not copy.exists():
        partial = copy.with_name(f"{copy.name}.partial")
        write_records(dataset, partial, target.tokenizer_path)
        partial.replace(copy)
    return as_sent(spec, run_dir, target.topology)


def _copy(run_dir: Path, topology: str) -> Path:
    return run_dir / _COPIES / f"{topology}.jsonl"


@functools.lru_cache(maxsize=8)
def _read(file: Path, form: str | None, is_scheduled: bool, seen: tuple[object, ...]) -> Dataset:
    """``seen``: what tells that the file is another by now."""
    return read_dataset(file, form, is_scheduled=is_scheduled)


def is_readable(path: Path) -> bool:
    """Not so a pipe, which may never end and gives its records once."""
    try:
        return (path.is_file() or path.is_dir()) and os.access(path, os.R_OK)
    except OSError:  # a name that is too long
        return False
