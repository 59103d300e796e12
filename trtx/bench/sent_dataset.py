"""Prepares a load's ``input_file`` for aiperf: names its form as aiperf does, or copies it to a form of aiperf's."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import NoReturn

from trtx.bench.answer_formats import FORMAT_FIELDS, RequestedFormat
from trtx.bench.body_ranges import RANGES
from trtx.bench.datasets import Dataset, read_dataset, write_records
from trtx.bench.load import LoadSpec, Target
from trtx.config.wording import quoted
from trtx.errors import UsageError

_COPIES = "datasets"  # in a run's directory


def dataset_of(spec: LoadSpec) -> Dataset | None:
    """Reads and checks the load's ``input_file``; None if it has none. Raises UsageError for an invalid record."""
    if (file := spec.input_file) is None:
        return None
    status = file.stat()
    # Paths of media files in the records are relative to the current directory.
    seen = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, Path.cwd())
    return _read(file, spec.custom_dataset_type, spec.fixed_schedule, not spec.aiperf_args, seen)


def check_dataset(spec: LoadSpec, *, context_length: int | None, is_dynamo: bool) -> None:
    """Raises UsageError for a record with more tokens than the context, or with a value that Dynamo's frontend refuses.

    ``context_length`` None: unknown, so not checked.
    """
    dataset = dataset_of(spec)
    if dataset is None:
        return
    where, tokens = dataset.most
    if context_length is not None and tokens > context_length:
        _refuse(
            dataset,
            where,
            f"its prompt and answer have {tokens:,} tokens, but the context length is {context_length:,}; "
            "leave it out, or raise max_seq_len, up to the model's own limit",
        )
    for record, name, value in dataset.numbers:
        if is_dynamo and not RANGES[name].holds(value):
            _refuse(
                dataset,
                record,
                f"{name} is {value}, but Dynamo's frontend accepts only {RANGES[name]} and would refuse the request; "
                "change it",
            )


def asks_formats(spec: LoadSpec) -> bool:
    """Whether a request of the load may ask for structured output or offer tools; True if that is not known."""
    if not FORMAT_FIELDS.isdisjoint(spec.extra_inputs):
        return True
    try:
        dataset = dataset_of(spec)
    except (OSError, UsageError):  # the file has changed since the load was checked
        return True
    return dataset is not None and dataset.asks_formats


def check_guidance(spec: LoadSpec, lacks: str) -> None:
    """Raises UsageError if a request of the load needs guided decoding. ``lacks``: why the topology has none."""
    own = RequestedFormat.of(spec.extra_inputs)
    dataset = dataset_of(spec) if spec.input_file is not None else None
    if own is not None and own.needs_guidance:
        raise UsageError(f"extra_inputs asks for structured output, but {lacks}")
    if dataset is not None and dataset.guided:
        _refuse(dataset, dataset.guided, f"it asks for structured output, but {lacks}")


def _refuse(dataset: Dataset, where: str, problem: str) -> NoReturn:
    raise UsageError(f"input_file {quoted(str(dataset.path))}, {where}: {problem}")


def as_sent(spec: LoadSpec, run_dir: Path, topology: str) -> LoadSpec:
    """The load with the file and form for aiperf's command line. :func:`prepare_dataset` makes the copy if needed."""
    dataset = dataset_of(spec)
    if dataset is None:
        return spec
    path = _copy(run_dir, topology) if dataset.is_copied else dataset.path
    return spec.model_copy(update={"input_file": path, "custom_dataset_type": dataset.sent_as})


def prepare_dataset(spec: LoadSpec, run_dir: Path, target: Target) -> LoadSpec:
    """Makes the copy, if aiperf needs one, and returns :func:`as_sent`.

    Each topology has its own copy, because its tokenizer determines the output lengths.
    """
    dataset, copy = dataset_of(spec), _copy(run_dir, target.topology)
    if dataset is not None and dataset.is_copied and not copy.exists():
        partial = copy.with_name(f"{copy.name}.partial")
        write_records(dataset, partial, target.tokenizer_path)
        partial.replace(copy)
    return as_sent(spec, run_dir, target.topology)


def _copy(run_dir: Path, topology: str) -> Path:
    return run_dir / _COPIES / f"{topology}.jsonl"


@functools.lru_cache(maxsize=8)
def _read(
    file: Path, form: str | None, is_scheduled: bool, has_usual_blocks: bool, seen: tuple[object, ...]
) -> Dataset:
    """Reads the dataset, with a cache. ``seen``: the file's identity; a changed file is read again.

    ``has_usual_blocks``: blocks have the default size, because no arguments for aiperf were given.
    """
    usual = {} if has_usual_blocks else {"block_tokens": None}
    return read_dataset(file, form, is_scheduled=is_scheduled, **usual)


def is_readable(path: Path) -> bool:
    """Whether ``path`` is a readable file or directory. A pipe is not: it may never end, and can be read only once."""
    try:
        return (path.is_file() or path.is_dir()) and os.access(path, os.R_OK)
    except OSError:  # for example a name that is too long
        return False
