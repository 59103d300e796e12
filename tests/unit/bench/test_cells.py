"""From aiperf's records to a cell: what is measured, what failed, and what is no result."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtx.bench import Cell, LoadSpec, Target, read_cells
from trtx.bench.cells import CELL, measure_cell
from trtx.bench.metrics import (
    error_request_count,
    output_token_throughput_per_device,
)
from trtx.errors import UsageError

GONE = "aiperf exited 1 without a result: All 4 inference request(s) failed"
TARGET = Target("http://127.0.0.1:1", "m", Path("m"), "agg")
SPEC = LoadSpec(concurrency=(2,), isl=64, osl=8, request_count=4, warmup_request_count=1)
(LOAD,) = SPEC.loads


def entry(*, phase: str = "profiling", error: str | None = None, tokens: int | None = 8) -> dict[str, Any]:
    metrics = {"time_to_first_token": 10.0, "inter_token_latency": 2.0, "request_latency": 24.0}
    metrics |= {} if tokens is None else {"output_sequence_length": tokens, "input_sequence_length": 64}
    return {
        "metadata": {"benchmark_phase": phase, "request_start_ns": 0, "request_end_ns": 10**9},
        "metrics": {} if error else {name: {"value": value} for name, value in metrics.items()},
        "error": {"code": 500, "type": "Error", "message": error} if error else None,
    }


def measured(directory: Path, *trials: list[dict[str, Any]], gone: dict[int, str] | None = None) -> Cell:
    for number, entries in enumerate(trials, start=1):
        trial = directory / f"trial-{number:02d}"
        trial.mkdir(parents=True)
        lines = [json.dumps(one) + "\n" for one in (entry(phase="warmup", error="cold"), *entries)]
        (trial / "profile_export.jsonl").write_text("".join(lines))
    spec = SPEC.model_copy(update={"trials": len(trials)})
    return measure_cell(directory, TARGET, spec, LOAD, range(1, len(trials) + 1), failures=gone)


def test_requests_that_all_failed_are_a_result_although_aiperf_gave_none(tmp_path: Path) -> None:
    cell = measured(tmp_path, [entry(error="boom")] * 4, gone={1: GONE})
    assert (cell.status, cell.failure, cell.errors) == ("errors", None, (("HTTP 500 boom", 4),))
    assert cell.value(error_request_count) == 4
    assert cell.value(output_token_throughput_per_device) is None


@pytest.mark.parametrize(
    ("gpus", "workers", "device", "count"),
    [(8, 3, "gpu", 8), (8, None, "gpu", 8), (0, 3, "worker", 3), (None, 3, "worker", 3), (None, None, "worker", None)],
)
def test_figures_are_per_gpu_where_there_are_some_else_per_worker_and_of_none_where_nobody_said(
    tmp_path: Path, gpus: int | None, workers: int | None, device: str, count: int | None
) -> None:
    (tmp_path / "trial-01").mkdir()
    (tmp_path / "trial-01" / "profile_export.jsonl").write_text("".join(json.dumps(entry()) + "\n" for _ in range(4)))
    target = replace(TARGET, gpu_count=gpus, worker_count=workers)
    cell = measure_cell(tmp_path, target, SPEC, LOAD, [1])
    assert (cell.device, cell.device_count) == (device, count)
    assert cell.value(output_token_throughput_per_device) == (None if count is None else pytest.approx(32 / count))
    CELL.write(tmp_path / "cells" / "agg-c2", cell.to_json())
    assert read_cells(tmp_path)[0].device_count == count


def test_an_aiperf_that_ended_badly_over_good_requests_left_no_result(tmp_path: Path) -> None:
    cell = measured(tmp_path, [entry()] * 4, gone={1: "aiperf exited 1 without a result"})
    assert (cell.status, cell.failure, cell.figures) == ("failed", "aiperf exited 1 without a result", None)


def test_a_request_without_a_record_is_no_success(tmp_path: Path) -> None:
    cell = measured(tmp_path, [entry()] * 3)
    assert cell.status == "failed"
    assert cell.failure == "aiperf left records of 3 of 4 measured requests"


def test_of_a_cells_trials_the_worst_counts_and_their_reasons_are_one_list(tmp_path: Path) -> None:
    whole, bare, broken = entry(), entry(tokens=None), entry(error="boom")
    cell = measured(tmp_path, [whole] * 4, [bare] * 4, [whole, whole, whole, broken], [whole, whole, broken, broken])
    assert [trial.status for trial in cell.trials] == ["ok", "uncounted", "errors", "errors"]
    assert (cell.status, cell.errors) == ("errors", (("HTTP 500 boom", 3),))


def test_a_cell_of_the_schema_before_is_refused_with_what_to_do(tmp_path: Path) -> None:
    directory = tmp_path / "cells" / "agg-c2"
    CELL.write(directory, measured(directory, [entry()] * 4).to_json())
    assert [cell.status for cell in read_cells(tmp_path)] == ["ok"]
    document = json.loads((directory / "cell.json").read_text())
    (directory / "cell.json").write_text(json.dumps(document | {"schema_version": CELL.oldest - 1}))
    with pytest.raises(
        UsageError, match=f"schema_version {CELL.oldest - 1}, but this trtx reads .*: a cell was.*new run"
    ):
        read_cells(tmp_path)


def test_a_cell_survives_its_file(tmp_path: Path) -> None:
    directory = tmp_path / "cells" / "agg-c2"
    cell = measured(directory, [entry()] * 4)
    CELL.write(directory, cell.to_json())
    assert read_cells(tmp_path) == (cell,)


def _validity(directory: Path, spec: LoadSpec, lengths: list[int]) -> tuple[set[str], dict[str, str]]:
    """Checks that speak against a cell of prompts that were so long, and why others were not made."""
    trial = directory / "trial-01"
    trial.mkdir(parents=True)
    entries = [entry() for _ in lengths]
    for one, tokens in zip(entries, lengths, strict=True):
        one["metrics"]["input_sequence_length"] = {"value": tokens}
        one["metrics"]["usage_prompt_cache_read_tokens"] = {"value": tokens // 2}
    (trial / "profile_export.jsonl").write_text("".join(json.dumps(one) + "\n" for one in entries))
    cell = measure_cell(directory, TARGET, spec, spec.loads[0], [1])
    assert cell.validity is not None and cell.figures is not None
    return {one.name for one in cell.validity.reasons}, {one.name: one.why for one in cell.validity.unchecked}


@pytest.mark.parametrize(
    ("fields", "against", "unchecked"),
    [
        ({}, {"input length", "prefix hits"}, {}),
        ({"session_turns_mean": 2}, set(), {"input length": "sets no input", "prefix hits": "share prefixes"}),
        ({"prefix_prompt_length": 32}, {"input length"}, {"prefix hits": "share prefixes"}),
        (
            {"public_dataset": "sharegpt", "isl": [], "ignore_eos": True},
            set(),
            {"input length": "sets no", "output length": "sets no", "prefix hits": "it is not known"},
        ),
    ],
)
def test_what_a_load_leaves_open_is_not_checked(
    tmp_path: Path, fields: dict[str, Any], against: set[str], unchecked: dict[str, str]
) -> None:
    """Twice as many input tokens as asked, half of them cached."""
    spec = LoadSpec.model_validate({"concurrency": [2], "isl": 64, "request_count": 4, "osl": 8, **fields})
    reasons, open_ = _validity(tmp_path, spec, [128] * 4)
    judged = {"input length", "output length", "prefix hits"}
    assert reasons & judged == against
    for name, why in unchecked.items():
        assert why in open_[name]


def test_a_system_message_has_a_few_tokens_of_the_chat_template(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"concurrency": [2], "isl": 64, "request_count": 4, "osl": 8}
    for name, fields, tokens, is_held_against in (
        ("plain", {}, 70, True),
        ("system", {"shared_system_prompt_length": 32}, 70, False),
        ("longer", {"shared_system_prompt_length": 32}, 90, True),
    ):
        reasons, _ = _validity(tmp_path / name, LoadSpec.model_validate(asked | fields), [tokens] * 4)
        assert ("input length" in reasons) is is_held_against
