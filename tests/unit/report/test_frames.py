"""The tables of a run that notebooks open: their rows, their nulls, their units, and the page that describes them."""

from __future__ import annotations

import json
import re
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from examples import first_of

from tests.unit.report.noted_digests import note_end
from trtx.bench.intact import read_kept_documents
from trtx.bench.metric_types import all_figures
from trtx.bench.readings import GpuReading, ServerReading, write_readings
from trtx.bench.records import NAMED_MODELS
from trtx.report import read_run, render
from trtx.report.frames import records_table, summary_table

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
RECORDS = "profile_export.jsonl"


def tables(run: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    render(run)
    return pd.read_parquet(run / "summary.parquet"), pd.read_parquet(run / "records.parquet")


def lines_of(run: Path, name: str) -> list[dict[str, Any]]:
    path = run / "cells" / name / "trial-01" / RECORDS
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_rows_of_cells_are_those_of_the_csv_and_of_the_json(golden_run: Path) -> None:
    summary, _ = tables(golden_run)
    cells = summary[summary["scope"] == "cell"].drop(columns=["scope", "trial"]).reset_index(drop=True)
    text = pd.read_csv(golden_run / "summary.csv", dtype=dict(cells.dtypes), keep_default_na=False, na_values=[""])
    texts = [name for name, kind in cells.dtypes.items() if kind == "string"]  # the CSV has no null beside ""
    pd.testing.assert_frame_equal(text.fillna(dict.fromkeys(texts, "")), cells.fillna(dict.fromkeys(texts, "")))
    rows = json.loads((golden_run / "summary.json").read_text(encoding="utf-8"))["rows"]
    for found, row in zip(cells.astype(object).to_dict("records"), rows, strict=True):
        assert {name: None if value is pd.NA else value for name, value in found.items()} == row


def test_a_request_of_aiperf_is_one_row(golden_run: Path) -> None:
    _, requests = tables(golden_run)
    for name in ("agg-c1", "disagg-c2"):
        topology, _, load = name.partition("-")
        found = requests[(requests["topology"] == topology) & (requests["load"] == load)].set_index("start_ns")
        lines = lines_of(golden_run, name)
        assert len(found) == len(lines)
        for line in lines:
            row, metrics = found.loc[line["metadata"]["request_start_ns"]], line["metrics"]
            assert (row["phase"], row["end_ns"]) == (
                line["metadata"]["benchmark_phase"],
                line["metadata"]["request_end_ns"],
            )
            for metric in ("time_to_first_token", "request_latency", "output_sequence_length"):
                assert row[metric] == metrics[metric]["value"]


def test_what_is_not_known_is_null_and_never_0(golden_run: Path) -> None:
    shutil.rmtree(golden_run / "cells" / "agg-c1")
    summary, requests = tables(golden_run)
    (missing,) = summary[summary["status"] == "missing"].to_dict("records")
    assert (missing["topology"], missing["load"], missing["trials"]) == ("agg", "c1", 0)
    counted = {"concurrency", "request_count_asked", "warmup_request_count", "isl", "osl"}
    quantities = summary.attrs["units"].keys() - counted
    assert {name: missing[name] for name in quantities if pd.notna(missing[name])} == {}
    assert summary["images_per_second"].isna().all() and requests["image_count"].isna().all()
    assert requests["reading_ns"].isna().all() and requests["gpu_power_w_sum"].isna().all()


def test_types_and_units_are_the_same_whatever_was_measured(golden_run: Path, tmp_path: Path) -> None:
    whole = tables(golden_run)
    nothing = Path(shutil.copytree(golden_run, tmp_path / "nothing"))
    shutil.rmtree(nothing / "cells")
    for full, empty in zip(whole, tables(nothing), strict=True):
        assert len(full) > len(empty)
        assert dict(full.dtypes) == dict(empty.dtypes)
        of_workers = {name.replace("_gpu", "_worker") for name in full.attrs["units"]}
        assert {name.replace("_gpu", "_worker") for name in empty.attrs["units"]} == of_workers
        numbers = {name for name, kind in full.dtypes.items() if kind in ("Float64", "Int64")}
        assert numbers - full.attrs["units"].keys() <= {"trial", "trials", "trials_asked"}


def test_a_request_is_joined_with_the_last_reading_before_its_end(golden_run: Path) -> None:
    first, *_, last = sorted(line["metadata"]["request_end_ns"] for line in lines_of(golden_run, "agg-c1"))
    gpus = (GpuReading("GPU 0", 1980, power_w=400.0, temperature_c=60), GpuReading("GPU 1", 1200, power_w=300.0))
    readings = [
        ServerReading(first - 4_000_000_000, gpus, {"agg": {"agg-0": 1}}),
        ServerReading(first + 1, gpus, {"agg": {"agg-0": 5, "agg-1": 2}}),
        ServerReading(last + 1, None, None),
    ]
    write_readings(golden_run / "cells" / "agg-c1" / "trial-01", readings)
    _, requests = tables(golden_run)
    found = requests[(requests["topology"] == "agg") & (requests["load"] == "c1")].set_index("end_ns")
    assert found.loc[first, "reading_ns"] is pd.NA, "the one before it is more than 3 s old"
    assert found["reading_ns"].iloc[1:].eq(first + 1).all(), "an integer that no float has rounded"
    row = found.loc[last]
    assert (row["gpu_sm_clock_mhz_min"], row["gpu_power_w_sum"], row["ended_requests"]) == (1200, 700, 7)
    assert row["gpu_temperature_c_max"] is pd.NA, "one of the GPUs does not say it"


NO_TIME = {"benchmark_phase": "profiling", "request_start_ns": "now", "request_end_ns": 2}
UNREADABLE = [
    json.dumps({"metadata": NO_TIME}),
    '{"metadata": {',
    "[]",
    "null",
    '{"metadata": {"benchmark_phase": "profiling"}}',
    '{"other": 1}',
    None,
]


@pytest.mark.parametrize("text", first_of(3, UNREADABLE))
@pytest.mark.parametrize("file", [RECORDS, "readings.json"])
def test_files_that_can_not_be_read_are_no_rows_and_no_error(golden_run: Path, file: str, text: str | None) -> None:
    path = golden_run / "cells" / "agg-c1" / "trial-01" / file
    if text is None:
        path.unlink(missing_ok=True)
    else:
        path.write_text(text, encoding="utf-8")
    _, requests = tables(golden_run)
    lacks_readings = text is None and file != RECORDS  # as a run with --url does
    assert ("agg-c1" in set(requests["topology"] + "-" + requests["load"])) == lacks_readings


def test_a_text_that_is_no_unicode_is_shown_as_far_as_it_is(golden_run: Path) -> None:
    path = golden_run / "cells" / "agg-c1" / "trial-01" / RECORDS
    *others, last = lines_of(golden_run, "agg-c1")
    last["metadata"][NAMED_MODELS] = ["half \ud83d a pair"]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in [*others, last]), encoding="utf-8")
    _, requests = tables(golden_run)
    assert "half ? a pair" in requests["models"].dropna().item()


def test_records_that_were_changed_since_they_were_measured_are_no_rows(golden_run: Path) -> None:
    path = golden_run / "cells" / "agg-c1" / "trial-01" / RECORDS
    lines = (golden_run / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    noted = {RECORDS: {"bytes": path.stat().st_size, "sha256": sha256(path.read_bytes()).hexdigest()}}
    events = [json.loads(line) for line in lines]
    for event in events:
        if event["event"] == "trial_ended" and event["cell"] == "agg-c1":
            event["files"] = noted
    text = "".join(f"{json.dumps(event)}\n" for event in events)
    (golden_run / "journal.jsonl").write_text(text, encoding="utf-8")
    for had_rows in (True, False):
        _, requests = tables(golden_run)
        assert ("agg-c1" in set(requests["topology"] + "-" + requests["load"])) == had_rows
        path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")


def test_rendering_again_writes_the_same_bytes(golden_run: Path) -> None:
    kept = []
    for _ in range(2):
        render(golden_run)
        kept.append([(golden_run / name).read_bytes() for name in ("summary.parquet", "records.parquet")])
    assert kept[0] == kept[1]


def test_no_file_that_is_rendered_counts_as_changed_since_the_run_ended(golden_run: Path) -> None:
    note_end(golden_run)
    there = {path for path in golden_run.iterdir() if path.is_file()}
    for rendered in ("report.html", "summary.parquet", "records.parquet"):
        there.discard(golden_run / rendered)
        (golden_run / rendered).unlink(missing_ok=True)
    render(golden_run)
    assert {path.name for path in golden_run.iterdir() if path.is_file()} > {path.name for path in there}
    kept = read_kept_documents(golden_run)
    assert not kept.changed and not kept.gone and not kept.unknown


def test_the_snippets_of_the_page_run_as_they_are(golden_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    render(golden_run)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    code, count = re.subn(r'(?m)^run = ".*"$', f"run = {str(golden_run)!r}", "".join(blocks))
    assert count == 1
    exec(compile(code, "docs/notebooks.md", "exec"), {})
    assert "disagg" in (said := capsys.readouterr().out) and "tokens/s" in said and "0.99" in said


def test_the_page_has_every_column_with_its_unit(golden_run: Path) -> None:
    view = read_run(golden_run)
    for table, file in ((summary_table(view), "summary.parquet"), (records_table(golden_run, view), "records.parquet")):
        section = PAGE.partition(f"## `{file}`\n")[2].partition("\n## ")[0]
        told: dict[str, str] = {}
        for names, unit in re.findall(r"^\| (`.*?`) \| (.*?) ?\|", section, re.MULTILINE):
            told |= dict.fromkeys(re.findall(r"`([a-z_]+)`", names), unit)
        figures = {name for name in table.columns if name not in told} if file == "summary.parquet" else set()
        assert told == {name: table.attrs["units"].get(name, "") for name in table.columns if name not in figures}
        names = [figure.key(view.device) for figure in all_figures()]  # which docs/reference/metrics.md has
        assert not {column for column in figures if not column.removeprefix("steady_").startswith(tuple(names))}
