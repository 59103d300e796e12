from __future__ import annotations

import csv
import io
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from trtx.bench import Journal, read_cells
from trtx.bench.cells import CELL, Cell
from trtx.bench.journal import ProcessRestart, RunFailed, TopologyStopping
from trtx.bench.metric_types import all_figures
from trtx.errors import UsageError
from trtx.report import RunView, console_table, read_run, render
from trtx.report.charts import charts
from trtx.runs.forms import LOCK, PLAN, Deployment

pytestmark = pytest.mark.slow

MOST_IN_A_TERMINAL = 7  # beside topology, load and requests
FILES = ("summary.json", "summary.csv", "summary.md", "junit.xml", "report.html")


def _console_text(view: RunView) -> str:
    console = Console(width=80, file=io.StringIO())
    console.print(console_table(view))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return str(text)


def test_rendering_again_gives_the_same_bytes(golden_run: Path) -> None:
    render(golden_run)
    before = {name: (golden_run / name).read_bytes() for name in FILES}
    render(golden_run)
    assert {name: (golden_run / name).read_bytes() for name in FILES} == before


def test_csv_and_json_hold_the_same_rows(golden_run: Path) -> None:
    render(golden_run)
    rows = json.loads((golden_run / "summary.json").read_text())["rows"]
    with (golden_run / "summary.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [f"{row['topology']} {row['load']}" for row in table] == ["agg c1", "agg c2", "disagg c1", "disagg c2"]
    for of_json, of_csv in zip(rows, table, strict=True):
        assert list(of_json) == list(of_csv)
        assert float(of_csv["time_to_first_token_p50"]) == of_json["time_to_first_token_p50"]


def test_two_workers_halve_the_figure_per_worker(golden_run: Path) -> None:
    render(golden_run)
    rows = json.loads((golden_run / "summary.json").read_text())["rows"]
    disagg = next(row for row in rows if row["topology"] == "disagg")
    assert disagg["output_token_throughput_per_worker"] == pytest.approx(disagg["output_token_throughput"] / 2)
    assert "output_token_throughput_per_gpu" not in disagg


def test_the_console_table_fits_80_columns_and_marks_what_lacks_samples(golden_run: Path) -> None:
    text = _console_text(read_run(golden_run))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "/worker" in text and "/GPU" not in text
    assert "~" in text  # 12 samples support a median, no p90


def test_tokens_a_user_are_marked_where_few_answers_came_in_several_pieces(golden_run: Path) -> None:
    shown = []
    for count in (11, 10):  # of 12 requests, as many as have an ITL
        for file in golden_run.glob("cells/*/cell.json"):
            document = json.loads(file.read_text())
            document["figures"]["inter_token_latency"]["count"] = count
            document["figures"]["output_token_throughput_per_user"] = 1234.0
            file.write_text(json.dumps(document))
        render(golden_run)
        texts = (_console_text(read_run(golden_run)), (golden_run / "summary.md").read_text(encoding="utf-8"))
        shown.append(["~1,234" in text for text in texts])
    assert shown == [[False, False], [True, True]]


def test_the_console_table_fits_80_columns_with_large_figures_and_failures(golden_run: Path) -> None:
    for file in golden_run.glob("cells/disagg-*/cell.json"):
        document = json.loads(file.read_text())
        concurrency = 1023 + document["load"]["concurrency"]
        document["load"] |= {"concurrency": concurrency, "label": f"c{concurrency}"}
        document["figures"] |= {"request_count": 1024, "error_request_count": 12, "output_token_throughput": 54321.0}
        document["figures"]["output_token_throughput_per_user"] = 1234.5
        document["figures"]["time_to_first_token"] |= {"p50": 12345.6, "p90": 23456.7, "p99": 34567.8}
        file.write_text(json.dumps(document))
    text = _console_text(read_run(golden_run))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text and "~34,568" in text and "54,321" in text and "27,160" in text


def test_a_cell_that_was_never_measured_shows_and_is_an_error_in_junit(golden_run: Path) -> None:
    shutil.rmtree(golden_run / "cells" / "disagg-c2")
    Journal(golden_run).note(RunFailed(error="decode-0 exited 137"))
    view = render(golden_run)
    assert [row.status for row in view.rows] == ["ok", "ok", "ok", "missing"]
    assert not view.is_clean
    suite = ElementTree.parse(golden_run / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("4", "0", "1")
    for name in ("summary.md", "report.html"):
        text = (golden_run / name).read_text(encoding="utf-8")
        assert "decode-0 exited 137" in text and "disagg-c2" in text


def test_failed_requests_show_in_every_form(golden_run: Path) -> None:
    cell_file = golden_run / "cells" / "agg-c2" / "cell.json"
    document = json.loads(cell_file.read_text())
    document["figures"] |= {"request_count": 9, "error_request_count": 3, "request_error_rate": 25.0}
    document["trials"][0] |= {"status": "errors", "errors": [["HTTP 500 boom <b>", 3]]}
    cell_file.write_text(json.dumps(document))
    view = render(golden_run)
    assert view.requests_failed == 3
    assert [line.split()[2:4] for line in _console_text(view).splitlines() if line.startswith("agg")][1] == ["9", "3"]
    page = (golden_run / "report.html").read_text(encoding="utf-8")
    assert "3 of 48 requests failed" in page
    assert "HTTP 500 boom &lt;b&gt;" in page and "boom <b>" not in page
    suite = ElementTree.parse(golden_run / "junit.xml").getroot()
    assert (suite.get("failures"), suite.get("errors")) == ("1", "0")


LENGTHS = ("input_sequence_lengths", "output_sequence_lengths")


def spoil(run: Path, name: str, figures: dict[str, object], **trial: object) -> None:
    """Makes another cell of one of the golden run's."""
    path = run / "cells" / name / "cell.json"
    document = json.loads(path.read_text())
    document["figures"] |= figures
    document["trials"][0] |= trial
    path.write_text(json.dumps(document))


def test_every_reason_stands_under_the_console_table_within_80_columns(golden_run: Path) -> None:
    errors = [["error in the answer: " + "the engine died " * 10, 8], ["HTTP 404 model not found", 2]]
    spoil(golden_run, "agg-c2", {"request_count": 2, "error_request_count": 10}, status="errors", errors=errors)
    view = render(golden_run)
    text = _console_text(view)
    assert "agg-c2: 10 of 12 failed\n  8 × error in the answer: the engine died" in text
    assert "  2 × HTTP 404 model not found" in text
    assert max(map(len, text.splitlines())) <= 80
    summary = json.loads((golden_run / "summary.json").read_text())
    assert summary["failures"] == {"agg-c2": [{"reason": reason, "count": count} for reason, count in errors]}
    failure = ElementTree.parse(golden_run / "junit.xml").getroot()[1].find("failure")
    assert failure is not None and (failure.get("message") or "").startswith("10 of 12 failed: 8 × error in the answer")


def test_a_cell_with_failed_requests_is_nowhere_the_best(golden_run: Path) -> None:
    figures = {"error_request_count": 3, "output_token_throughput_per_user": 99999.0}
    spoil(golden_run, "agg-c2", figures, status="errors", errors=[["boom", 3]])
    spoil(golden_run, "agg-c1", figures, status="errors", errors=[["boom", 3]])
    view = render(golden_run)
    drawn = charts(view, (64, 16))
    assert not next(line for line in drawn["pareto"]["data"] if line["name"] == "agg front")["x"]
    assert drawn["throughput"]["data"][0]["marker"]["symbol"] == ["x", "x"]
    page = (golden_run / "report.html").read_text(encoding="utf-8")
    best = page[page.index('aria-label="Best of each topology"') : page.index('aria-label="Charts"')]
    assert "<h2>disagg</h2>" in best and "<h2>agg</h2>" not in best


def test_answers_without_usage_are_a_dash_and_a_note_in_every_form(golden_run: Path) -> None:
    unknown = dict.fromkeys(
        ("output_token_throughput", "output_token_throughput_per_user", "inter_token_latency", *LENGTHS)
    )
    spoil(golden_run, "agg-c2", {**unknown, "uncounted_request_count": 12}, status="uncounted")
    view = render(golden_run)
    line = next(line for line in _console_text(view).splitlines() if line.startswith("agg") and " c2? 12 " in line)
    assert line.split()[4] == "–" and "0" not in line.split()[4:7]
    assert not view.is_clean
    suite = ElementTree.parse(golden_run / "junit.xml").getroot()
    assert (suite.get("failures"), suite.get("errors")) == ("0", "1")
    for name in ("summary.md", "report.html", "junit.xml"):
        assert "12 of 12 answers carry no usage" in (golden_run / name).read_text(encoding="utf-8"), name
    conditions = {condition.name: condition.value for condition in view.conditions}
    assert conditions["ISL / OSL"] == "64 asked / 16 asked tokens"  # nobody counted that they are exact


def test_a_restart_while_measuring_is_said_beside_the_figures(golden_run: Path) -> None:
    restarts = (ProcessRestart(name="agg-0", at=1.0, exit="exited 137 (SIGKILL)"),)
    Journal(golden_run).note(TopologyStopping(topology="agg", restarts=restarts))
    view = render(golden_run)
    assert not view.is_clean
    assert any("1 restart" in note and "agg-0" in note for note in view.notes)


def test_the_page_names_the_conditions_it_was_measured_under(golden_run: Path) -> None:
    render(golden_run)
    page = (golden_run / "report.html").read_text(encoding="utf-8")
    conditions = json.loads((golden_run / "summary.json").read_text())["conditions"]
    for name in (
        "Command",
        "Model",
        "Engine",
        "GPUs",
        "CPU",
        "ISL / OSL",
        "Warm-up",
        "Seed",
        "Started",
        "Commit",
        "Versions",
    ):
        assert conditions[name], name
        assert f"<dt>{name}</dt>" in page, name


@pytest.mark.parametrize(("labels", "told"), [(("agg", "disagg"), "yes"), (("disagg",), "disagg"), ((), "")])
def test_a_deterministic_topology_is_told_as_one_in_every_form(
    golden_run: Path, labels: tuple[str, ...], told: str
) -> None:
    path = golden_run / "plan.json"
    plan = json.loads(path.read_text())
    for label in labels:
        for process in plan["topologies"][label]["processes"]:
            process["argv"] += ["--deterministic"] if process["role"] != "frontend" else []
    path.write_text(json.dumps(plan))
    render(golden_run)
    markdown, page = ((golden_run / name).read_text() for name in ("summary.md", "report.html"))
    summary = json.loads((golden_run / "summary.json").read_text())
    assert summary["conditions"].get("Deterministic", "") == told
    assert (f"| Deterministic | {told} |" in markdown) == ("Deterministic" in page) == bool(told)
    assert (f"Deterministic: {told}." in " ".join(_console_text(read_run(golden_run)).split())) == bool(told)
    served = dict(read_run(golden_run).topologies)
    assert {label for label, text in served.items() if text.endswith(", deterministic")} == {*labels}
    assert all(f"| {label} | {text} |" in markdown and text in page for label, text in served.items())


def test_the_machine_is_shown_as_far_as_it_is_known(golden_run: Path) -> None:
    lock = yaml.safe_load((golden_run / LOCK.file).read_text())
    gpu = {"name": "H100", "memory_bytes": 2**36, "max_sm_clock_mhz": 1980, "power_limit_w": 700}
    of_gpus = [{**gpu, "uuid": f"GPU-{number}", "application_sm_clock_mhz": None} for number in range(2)]
    of_gpus += [{**gpu, "uuid": "GPU-2", "application_sm_clock_mhz": 1410, "power_limit_w": None}]
    lock["provenance"]["environment"] |= {
        "gpus": of_gpus, "sm_clocks_mhz": [345, 345, None], "gpu_driver": "580.95.05", "driver_cuda": "13.0",
        "torch_cuda": "12.9", "container": {"kind": "podman", "image": "repo/serve:1.2", "nvidia_build": None},
        "commit_changes": "fedcba987654",
        "versions": {"trtx": "0.1.0", "nvidia-cublas": "13.1", "torch": "2.13.0"},
    }  # fmt: skip
    LOCK.write(golden_run, lock)
    conditions = {condition.name: condition.value for condition in read_run(golden_run).conditions}
    shown = {
        "GPU limits": "1980 MHz, 700 W; 1410 MHz", "GPU driver": "580.95.05", "CUDA": "driver's 13.0, torch's 12.9",
        "Container": "podman, repo/serve:1.2", "Commit": "0123456789ab and changes fedcba987654",
        "Versions": "trtx 0.1.0, torch 2.13.0",
    }  # fmt: skip
    assert {name: conditions.get(name) for name in shown} == shown
    assert conditions["Model's files"] == "6 of 5,281,899 bytes, sampled SHA-256 252b81f8c192"  # of both modes


def test_modes_with_other_files_show_both(golden_run: Path) -> None:
    lock = yaml.safe_load((golden_run / LOCK.file).read_text())
    lock["provenance"]["measured"]["disagg"]["files"]["sampled_sha256"] = "f" * 64
    LOCK.write(golden_run, lock)
    (shown,) = [one.value for one in read_run(golden_run).conditions if one.name == "Model's files"]
    assert [part[-12:] for part in shown.split("; ")] == ["252b81f8c192", "f" * 12]


def attached(run: Path, **told: object) -> dict[str, str]:
    """The conditions of the golden run's first cells, had something else served them and told this of itself."""
    lock = yaml.safe_load((run / LOCK.file).read_text())
    (run / PLAN.file).unlink()
    unknown = {one.name: None for one in fields(Deployment)} | {"url": "http://127.0.0.1:9", "model": "tiny"}
    lock["provenance"]["environment"]["deployment"] = {**unknown, **told}
    LOCK.write(run, {**lock, "attach": {"url": "http://127.0.0.1:9", "model": None}})
    return {condition.name: condition.value for condition in read_run(run).conditions}


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        (
            {},
            {
                "Server": "not known", "Server's engine": "not known", "Server's versions": "not known",
                "Server's workers": "not known", "Server's GPUs": "not known", "API key": "none asked for",
            },
        ),
        (
            {
                "server": "NVIDIA Dynamo", "server_version": "1.4.2", "engine": "torch", "versions": {"trtx": "0.1.0"},
                "workers": {"prefill": 1, "decode": 2}, "gpu_names": ["H100", "H100", "A100"], "gpu_count": 3,
                "api_key_from": "OPENAI_API_KEY",
            },
            {
                "Server": "NVIDIA Dynamo 1.4.2", "Server's engine": "torch", "Server's versions": "trtx 0.1.0",
                "Server's workers": "1 prefill + 2 decode", "Server's GPUs": "2× H100, A100",
                "API key": "asked for and sent",
            },
        ),
        ({"server": "vLLM", "gpu_count": 4}, {"Server": "vLLM", "Server's GPUs": "4, of a kind not known"}),
        ({"gpu_names": [], "gpu_count": 0}, {"Server's GPUs": "none"}),
        ({"gpu_count": 0}, {"Server's GPUs": "none"}),
    ],
)  # fmt: skip
def test_an_attached_run_shows_what_the_other_side_told_and_that_the_rest_is_not_known(
    golden_run: Path, told: dict[str, object], shown: dict[str, str]
) -> None:
    conditions = attached(golden_run, **told)
    assert {name: conditions.get(name) for name in shown} == shown


def test_the_machine_that_made_the_load_is_not_taken_for_the_one_that_served_it(golden_run: Path) -> None:
    served = {condition.name for condition in read_run(golden_run).conditions}
    conditions = attached(golden_run, gpu_names=["H100", "H100"], gpu_count=2)
    for name in ("CPU", "Memory", "Versions", "Python", "Platform"):
        assert name in served and name not in conditions and f"Client's {name}" in conditions, name
    assert read_run(golden_run).subtitle == "attached to http://127.0.0.1:9, 2× H100"


def test_an_unknown_number_of_workers_is_a_dash_in_every_table(golden_run: Path) -> None:
    for path in golden_run.glob(f"cells/*/{CELL.file}"):
        document = json.loads(path.read_text()) | {"device_count": None}
        path.write_text(json.dumps(document))
    view = render(golden_run)
    rows = json.loads((golden_run / "summary.json").read_text())["rows"]
    assert {row["output_token_throughput_per_worker"] for row in rows} == {None}
    assert all(row["output_token_throughput"] for row in rows)
    assert "–" in _console_text(view)
    (line, *_) = [line for line in (golden_run / "summary.md").read_text().splitlines() if line.startswith("| agg")]
    assert line.count("–") == 1


def test_an_empty_run_directory_renders(tmp_path: Path) -> None:
    view = render(tmp_path)
    assert view.rows == () and not view.is_clean
    assert (tmp_path / "report.html").exists()


def test_cells_survive_their_file(golden_run: Path, tmp_path: Path) -> None:
    cells = read_cells(golden_run)
    assert [cell.name for cell in cells] == ["agg-c1", "agg-c2", "disagg-c1", "disagg-c2"]
    for cell in cells:
        CELL.write(tmp_path / cell.name, cell.to_json())  # in the current version, if the file has an older one
        assert CELL.read(tmp_path / cell.name, Cell) == cell


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("run.lock.yaml", "load:\n  isl: 32\n  os", "line 3: this is not YAML (while scanning a simple key"),
        (
            "run.lock.yaml",
            f"schema_version: {LOCK.version}\ntopologies: [agg]\nload:\n  seed: 7\n",
            "load.isl_stddev is missing",
        ),
        ("run.lock.yaml", "- another's list\n", "holds a list"),
        ("run.lock.yaml", "", "holds nothing"),
        (
            "run.lock.yaml",
            f"schema_version: {LOCK.version}\nattach: {{}}\ntopologies: [agg]\nload: 5\n",
            "load is 5; expected a map",
        ),
        ("run.lock.yaml", "\0", "a character that no YAML may hold"),
        ("plan.json", '{"modes": {"agg": ', "is not valid JSON (Expecting value"),
    ],
)
def test_a_record_that_was_cut_short_or_is_anothers_is_one_sentence(
    golden_run: Path, name: str, content: str, says: str
) -> None:
    (golden_run / name).write_text(content)
    with pytest.raises(UsageError) as refused:
        render(golden_run)
    told = str(refused.value)
    assert name in told and says in told
    assert len(told) < 1000 and "\n" not in told


def counted(run: Path, isl: tuple[int, int] = (64, 64), osl: tuple[int, int] = (16, 16), *, of: str = "*") -> None:
    """Says what the server counted in every request of a cell, of all without a name."""
    for path in run.glob(f"cells/{of}"):
        ranges = [{"min": least, "max": most} for least, most in (isl, osl)]
        spoil(run, path.name, dict(zip(LENGTHS, ranges, strict=True)))


def test_each_length_is_exact_for_itself_and_only_where_every_request_is_so_long(golden_run: Path) -> None:
    def lengths() -> str:
        conditions = {condition.name: condition.value for condition in read_run(golden_run).conditions}
        return conditions["ISL / OSL"]

    counted(golden_run)
    assert lengths() == "64 exact / 16 exact tokens"
    counted(golden_run, isl=(62, 65), of="agg-c1")
    assert lengths() == "64 asked (62 to 65 counted) / 16 exact tokens"
    counted(golden_run, osl=(15, 17), of="agg-c1")  # a mean of 16
    assert lengths() == "64 exact / 16 asked (15 to 17 counted) tokens"
    spoil(golden_run, "agg-c1", dict.fromkeys(LENGTHS))
    assert lengths() == "64 asked / 16 asked tokens"


def test_lengths_and_prompts_of_a_dataset_and_of_sessions_are_told_as_they_are(golden_run: Path) -> None:
    def told(of_the_load: dict[str, Any], cell: dict[str, Any]) -> tuple[str, str]:
        lock = LOCK.load(golden_run)
        cells = [one | cell for one in lock["load"]["cells"]]
        LOCK.write(golden_run, {**lock, "load": lock["load"] | of_the_load | {"cells": cells}})
        for path in golden_run.glob("cells/*/cell.json"):
            document = json.loads(path.read_text())
            path.write_text(json.dumps(document | {"load": document["load"] | cell}))
        run = read_run(golden_run)
        assert not any(row.isl_text for row in run.rows), "no length of a prompt was asked"
        conditions = {condition.name: condition.value for condition in run.conditions}
        return conditions["ISL / OSL"], conditions["Prompts"]

    images = {"image_batch_size": 2, "prompts": "2 images of noise"}
    counted(golden_run, isl=(64, 64))
    assert told(images, {})[0] == "64 of text asked (64 counted, of images too) / 16 exact tokens"
    counted(golden_run, isl=(218, 218))
    assert told(images, {})[0] == "64 of text asked (218 counted, of images too) / 16 exact tokens"
    counted(golden_run, isl=(30, 200))
    sessions = {"image_batch_size": 0, "session_turns_mean": 3, "prompts": "3 turns a session"}
    assert told(sessions, {}) == ("64 asked (30 to 200 counted) / 16 exact tokens a turn", "3 turns a session")
    dataset = {"session_turns_mean": 1, "prompts": "of chats.jsonl", "ignore_eos": False}
    assert told(dataset, {"isl": None, "osl": None}) == (
        "what the dataset asked (30 to 200 counted) / what the dataset asked (16 counted) tokens",
        "of chats.jsonl",
    )


def test_prompts_that_are_not_as_long_as_asked_are_told_in_every_form(golden_run: Path) -> None:
    counted(golden_run)
    counted(golden_run, isl=(58, 70), of="agg-c1")
    assert read_run(golden_run).is_clean  # the chat template's own tokens and merges
    counted(golden_run, isl=(3, 64), of="agg-c2")
    view = render(golden_run)
    said = "the server counted prompts of 3 to 64 tokens; 64 were requested"
    assert not view.is_clean and f"agg-c2: {said}" in " ".join(_console_text(view).split())
    for name in ("summary.md", "summary.json", "summary.csv", "report.html"):
        text = (golden_run / name).read_text(encoding="utf-8")
        assert said in text and text.count(said) == 1, name


def test_the_metrics_of_the_terminals_table_fit_80_columns() -> None:
    figures = sum(len(record.table) for record in all_figures())
    assert figures <= MOST_IN_A_TERMINAL, (
        f"{figures} columns of figures are more than the {MOST_IN_A_TERMINAL} for which a terminal of 80 columns has "
        "room: take the table={…} of another figure, or a percentile of it, out of trtx/bench/metrics.py"
    )


def test_the_guide_explains_every_column_of_the_terminals_table() -> None:
    guide = "docs/guides/measure.md"
    section = (Path(__file__).parents[3] / guide).read_text(encoding="utf-8").partition("## Read the report")[2]
    rows = [line.strip("| ").split(" | ") for line in section.split("\n\n")[1].splitlines()[2:]]
    explained = {name: re.findall(r"\bp(\d+)\b", meaning) for names, meaning in rows for name in names.split(" or ")}
    shown: dict[str, list[str]] = {}
    for record in all_figures():
        for column, header in record.table.items():
            name = record.title if column else header.format(device="worker")
            shown.setdefault(name, []).extend([str(column)] if column else [])
    assert {name: explained.get(name) for name in shown} == shown, (
        f'the table of "Read the report" in {guide} lacks a column of the terminal, or a percentile of it: add it there'
    )


@pytest.mark.parametrize("name", FILES)
def test_an_interrupt_leaves_the_old_file_or_the_new_one(
    golden_run: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    render(golden_run)
    before = {path: path.read_bytes() for path in golden_run.iterdir() if path.is_file()}
    rename = Path.replace

    def interrupted(path: Path, target: Path) -> Path:
        if target.name == name:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        render(golden_run)
    assert {path: path.read_bytes() for path in golden_run.iterdir() if path.is_file()} == before
