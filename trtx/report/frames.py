"""Exports a run to two pandas tables: ``summary.parquet`` (cells and trials) and ``records.parquet`` (requests).

Unknown values are null. The unit of each column is in ``DataFrame.attrs["units"]``, which parquet keeps;
docs/notebooks.md describes the columns.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trtx.bench.cells import Trial, cell_directory
from trtx.bench.files import write_bytes
from trtx.bench.load import Load
from trtx.bench.metric_types import all_figures
from trtx.bench.readings import ServerReading, read_readings
from trtx.bench.records import RECORDS_FILE, RequestRecord, read_trial
from trtx.errors import UsageError
from trtx.report.columns import interval_columns
from trtx.report.summary import ASKED, PREFIXES, summary_row
from trtx.report.view import Row, RunView

if TYPE_CHECKING:
    import pandas as pd

SUMMARY_TABLE, RECORDS_TABLE = "summary.parquet", "records.parquet"
SCHEMA = 1
"""Schema version of both tables. Increase it when a column is removed or changes its meaning."""

Kind = Literal["string", "Int64", "Float64"]  # pandas' nullable types
# Maximum age, at a request's end, of the server reading that the request's row gets. Readings come about once a second.
_NEAR_NS = 3_000_000_000
# Errors of files that are missing, truncated, or written by another program.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, UsageError)
_ROW: dict[str, tuple[Kind, str]] = {"scope": ("string", ""), "trial": ("Int64", "")}
_LOAD: dict[str, tuple[Kind, str]] = {
    "concurrency": ("Int64", "requests"),
    "request_rate": ("Float64", "requests/s"),
    "isl": ("Int64", "tokens"),
    "osl": ("Int64", "tokens"),
    "request_count": ("Int64", "requests"),
    "warmup_request_count": ("Int64", "requests"),
}
_REQUEST: dict[str, tuple[Kind, str]] = {
    "topology": ("string", ""),
    "load": ("string", ""),
    "trial": ("Int64", ""),
    "phase": ("string", ""),
    "start_ns": ("Int64", "ns since 1970"),
    "end_ns": ("Int64", "ns since 1970"),
    "error": ("string", ""),
    "time_to_first_token": ("Float64", "ms"),
    "inter_token_latency": ("Float64", "ms"),
    "request_latency": ("Float64", "ms"),
    "input_sequence_length": ("Float64", "tokens"),
    "output_sequence_length": ("Float64", "tokens"),
    "credit_issued_ns": ("Int64", "ns since 1970"),
    "cached_input_tokens": ("Float64", "tokens"),
    "image_count": ("Float64", "images"),
    "models": ("string", ""),
}
_OF_RECORD = [field.name for field in fields(RequestRecord) if field.name != "others"]
_READING: dict[str, tuple[Kind, str]] = {
    "reading_ns": ("Int64", "ns since 1970"),
    "gpu_sm_clock_mhz_min": ("Float64", "MHz"),
    "gpu_power_w_sum": ("Float64", "W"),
    "gpu_temperature_c_max": ("Float64", "°C"),
    "ended_requests": ("Int64", "requests"),
}


def summary_columns(view: RunView) -> dict[str, tuple[Kind, str]]:
    """Type and unit of each column of ``summary.parquet``, in column order. Unit "": the column is not a quantity."""
    texts: tuple[Kind, str] = ("string", "")
    columns = {**_ROW, "topology": texts}
    columns |= {ASKED.get(one.name, one.name): _LOAD[one.name] for one in fields(Load) if one.name != "label"}
    columns |= dict.fromkeys(("load", "status", "validity", "validity_reasons", "not_checked"), texts)
    for part, prefix in PREFIXES.items():
        for metric in all_figures():
            for key in metric.flat(None, prefix + metric.key(view.device)):
                is_text = key.endswith("_percentiles_supported")
                unit = "requests" if key.endswith("_count") else metric.unit.format(device=view.device)
                columns[key] = texts if is_text else ("Int64" if unit == "requests" else "Float64", unit)
        for column in interval_columns(view, part):
            unit = column.metric.unit.format(device=view.device)
            columns |= {f"{prefix}{column.key}_{end}": ("Float64", unit) for end in ("low", "high")}
    return {**columns, "trials": ("Int64", ""), "trials_asked": ("Int64", ""), "problem": texts}


def summary_table(view: RunView) -> pd.DataFrame:
    """One row per cell (``scope`` "cell"), followed by one row per trial of the cell (``scope`` "trial")."""
    rows: list[dict[str, Any]] = []
    for row in view.rows:
        rows.append({"scope": "cell", "trial": None, **summary_row(view, row)})
        for trial in row.cell.trials if row.cell else ():
            rows.append({"scope": "trial", "trial": trial.number, **summary_row(view, _of_trial(row, trial))})
    return _table(view, rows, summary_columns(view))


def _of_trial(row: Row, trial: Trial) -> Row:
    """The row of a cell reduced to one trial. It keeps the cell's validity, which is judged over all trials."""
    assert row.cell is not None
    alone = replace(row.cell, trials=(trial,), trials_asked=1, figures=trial.figures, steady=trial.steady)
    return replace(row, cell=alone)


def records_table(run_dir: Path, view: RunView) -> pd.DataFrame:
    """One row per request of each trial that has a result, including warm-up requests and failed requests."""
    columns, trials = {**_REQUEST, **_READING}, []
    for row, trial in _measured_trials(view):
        with suppress(*UNREADABLE):
            trials.append(_trial_rows(run_dir, row, trial))
    try:
        return _table(view, list(chain.from_iterable(trials)), columns)
    except UNREADABLE:  # a value of another type in one of the trials
        readable = [rows for rows in trials if _is_readable(view, rows, columns)]
        return _table(view, list(chain.from_iterable(readable)), columns)


def _is_readable(view: RunView, rows: list[dict[str, Any]], columns: dict[str, tuple[Kind, str]]) -> bool:
    try:
        _table(view, rows, columns)
    except UNREADABLE:
        return False
    return True


def _measured_trials(view: RunView) -> Iterator[tuple[Row, Trial]]:
    for row in view.rows:
        # Omit changed records: the cell's metrics were computed from different ones. The report page says so.
        for trial in row.cell.trials if row.cell and not row.kept.changed else ():
            if trial.figures is not None:
                yield row, trial


def _trial_rows(run_dir: Path, row: Row, trial: Trial) -> list[dict[str, Any]]:
    """A row per request, ordered by its end, with the last server reading of the 3 s before its end."""
    directory = cell_directory(run_dir, row.name) / trial.directory
    records, read = read_trial(directory / RECORDS_FILE), read_readings(directory) or ()
    of_trial = {"topology": row.topology, "load": row.load.label, "trial": trial.number}
    phases = {"warmup": records.warm_up, "profiling": records.measured}
    rows = [{**of_trial, "phase": phase, **_request(one)} for phase, all_of in phases.items() for one in all_of]
    readings = sorted(map(_reading, read), key=itemgetter("reading_ns"))
    times_ns = [one["reading_ns"] for one in readings]
    for one in rows:
        before = bisect_right(times_ns, one["end_ns"]) - 1
        is_near = before >= 0 and one["end_ns"] - times_ns[before] <= _NEAR_NS
        one |= readings[before] if is_near else dict.fromkeys(_READING)
    return sorted(rows, key=itemgetter("end_ns"))


def _request(record: RequestRecord) -> dict[str, Any]:
    # A server may name its model with half of a surrogate pair, which parquet can't hold.
    models = ", ".join(record.models).encode("utf-8", "replace").decode("utf-8")
    return {name: getattr(record, name) for name in _OF_RECORD} | {"models": models or None}


def _reading(reading: ServerReading) -> dict[str, Any]:
    """One reading, combined over all GPUs and over all workers; a value that is unknown for any of them is null."""

    def over(name: str, summed: Any) -> float | None:
        known = [getattr(gpu, name) for gpu in reading.gpus or ()]
        return summed(known) if known and None not in known else None

    ended = reading.ended_requests
    return {
        "reading_ns": reading.at_ns,
        "gpu_sm_clock_mhz_min": over("sm_clock_mhz", min),
        "gpu_power_w_sum": over("power_w", sum),
        "gpu_temperature_c_max": over("temperature_c", max),
        "ended_requests": None if ended is None else sum(sum(workers.values()) for workers in ended.values()),
    }


def _table(view: RunView, rows: list[dict[str, Any]], columns: dict[str, tuple[Kind, str]]) -> pd.DataFrame:
    import pandas as pd

    kinds = {key: kind for key, (kind, _) in columns.items()}
    table = pd.DataFrame(rows, columns=list(columns), dtype=object).astype(kinds)
    table.attrs.update(_attributes(view, columns))
    return table


class _Units(dict[str, str]):
    """The unit of each column. Copies of a table share it, because pandas copies the attributes once per column."""

    def __deepcopy__(self, memo: object) -> _Units:
        return self


def _attributes(view: RunView, columns: dict[str, tuple[Kind, str]]) -> dict[str, Any]:
    units = _Units({key: unit for key, (_, unit) in columns.items() if unit})
    return {"schema": SCHEMA, "run": view.name, "model": view.model, "units": units}


def write_tables(run_dir: Path, view: RunView) -> None:
    """Writes ``summary.parquet`` and ``records.parquet`` to ``run_dir``. Raises OSError."""
    for name, table in ((SUMMARY_TABLE, summary_table(view)), (RECORDS_TABLE, records_table(run_dir, view))):
        write_bytes(run_dir / name, table.to_parquet(engine="pyarrow", index=False))
