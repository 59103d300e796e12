"""The load as aiperf gets it: an ``input_file`` under aiperf's name of its form, or a copy in a form that it reads."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import NoReturn

from trtx.bench.body_ranges import RANGES
from trtx.bench.datasets import Dataset, read_dataset, write_records
from trtx.bench.load import LoadSpec, Target
from trtx.config.wording import quoted
from trtx.errors import UsageError

_COPIES = "datasets"  # in a run's directory


def dataset_of(spec: LoadSpec) -> Dataset | None:
    """What the ``input_file`` holds, every record of it checked; None without one. Raises UsageError."""
    if (file := spec.input_file) is None:
        return None
    status = file.stat()
    seen = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, Path.cwd())  # media are relative to it
    return _read(file, spec.custom_dataset_type, spec.fixed_schedule, not spec.aiperf_args, seen)


def check_dataset(spec: LoadSpec, *, context_length: int | None, is_dynamo: bool) -> None:
    """Raises UsageError where a record asks for more tokens than the context holds, None: not known, or for what
    Dynamo's frontend refuses."""
    dataset = dataset_of(spec)
    if dataset is None:
        return
    where, tokens = dataset.most
    if context_length is not None and tokens > context_length:
        _refuse(
            dataset,
            where,
            f"its prompt and its answer have {tokens:,} tokens, and the context holds {context_length:,}; "
            "leave it out, or raise max_seq_len as far as the model's positions go",
        )
    for record, name, value in dataset.numbers:
        if is_dynamo and not RANGES[name].holds(value):
            _refuse(
                dataset,
                record,
                f"{name} is {value}, and Dynamo's frontend, which would refuse the request, takes {RANGES[name]}; "
                "change it",
            )


def _refuse(dataset: Dataset, where: str, problem: str) -> NoReturn:
    raise UsageError(f"input_file {quoted(str(dataset.path))}, {where}: {problem}")


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
def _read(
    file: Path, form: str | None, is_scheduled: bool, has_usual_blocks: bool, seen: tuple[object, ...]
) -> Dataset:
    """``has_usual_blocks``: no argument of aiperf's says another size. ``seen``: what tells that the file is another by
    now."""
    usual = {} if has_usual_blocks else {"block_tokens": None}
    return read_dataset(file, form, is_scheduled=is_scheduled, **usual)


def is_readable(path: Path) -> bool:
    """Not so a pipe, which may never end and gives its records once."""
    try:
        return (path.is_file() or path.is_dir()) and os.access(path, os.R_OK)
    except OSError:  # a name that is too long
        return False
