"""What a lock says that a run was asked of, and that docs/provenance.md names every field of it."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from scripted_nvml import GIB, H100S, refuses, script_two_gpus

from trtx.bench.documents import plain
from trtx.experiment import ExperimentSpec, load_sweep, plan_only
from trtx.experiment.directory import write_lock
from trtx.experiment.environment import environment
from trtx.experiment.provenance import provenance_of
from trtx.launch import prepare
from trtx.runs.forms import LOCK, AskedRun, Container, Environment, Files, MeasuredMode, Provenance, RecordedGpu

DOCUMENT = Path(__file__).parents[3] / "docs" / "provenance.md"
NOON = datetime(2026, 3, 4, 12, 0, 0, tzinfo=UTC)


def test_the_environment_has_every_gpu_driver_and_what_they_don_t_say_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    script_two_gpus(monkeypatch)
    monkeypatch.setattr(
        "pynvml.nvmlDeviceGetEnforcedPowerLimit", lambda uuid: 350_000 if uuid == H100S[0] else refuses()
    )
    found = environment([], NOON)
    assert found.gpus == (
        RecordedGpu(H100S[0], "NVIDIA H100 80GB HBM3", 80 * GIB, 1980, 1755, 350.0),
        RecordedGpu(H100S[1], "NVIDIA H100 80GB HBM3", 80 * GIB, 1980, 1755, None),
    )
    assert (found.sm_clocks_mhz, found.gpu_driver, found.driver_cuda) == ((1200, 1200), "580.95.05", "13.0")


def test_the_environment_has_the_versions_of_what_measures_serves_and_computes() -> None:
    found = environment(["trtx", "bench", "--model", "my model"], NOON)
    for package in ("trtx", "ai-dynamo", "aiperf", "torch", "transformers", "tokenizers", "nixl"):
        assert found.versions[package] == metadata.version(package), package
    assert next(iter(found.versions)) == "trtx" and "pytest" not in found.versions
    assert shlex.split(found.command)[-1] == "my model"


def test_a_lock_has_configs_and_calls_as_a_dry_run_shows_them_and_comes_back_as_it_was(tmp_path: Path) -> None:
    sweep = {"modes": ["agg", "disagg"], "topology": {"engine": "paced", "decode": 2}, "load": {"concurrency": [2, 1]}}
    spec = load_sweep(None, sweep)
    plans = {one.label: prepare(one.spec, run_dir=tmp_path / one.label) for one in spec.topologies}
    told = provenance_of(spec, environment([], NOON), dict(plans), None)
    assert told.measured.keys() == plans.keys()
    assert told.measured["disagg"].workers == {"prefill": 1, "decode": 2}
    assert told.measured["agg"].engine_configs == plans["agg"].engine_configs
    assert told.measured["agg"].files == told.measured["disagg"].files
    for planned in plan_only(spec, parent=tmp_path).topologies:
        calls = told.measured[planned.label].aiperf
        assert list(calls) == [f"{planned.label}-c2", f"{planned.label}-c1"]
        for call, of_dry_run in zip(calls.values(), planned.aiperf, strict=True):
            asked, expected = shlex.split(call), list(of_dry_run)
            of_this_place = [asked.index("--url") + 1, asked.index("--artifact-dir") + 1]
            assert [word for at, word in enumerate(asked) if at not in of_this_place] == [
                word for at, word in enumerate(expected) if at not in of_this_place
            ]
            assert expected[-1].endswith(asked[-1]) and asked[-1].startswith("cells/")

    write_lock(tmp_path, spec, told)
    read = LOCK.read(tmp_path, AskedRun).provenance
    assert read == replace(told, fields_sha256=read.fields_sha256) and read.fields_sha256 is not None
    assert LOCK.load(tmp_path)["provenance"] == plain(read)


@pytest.mark.parametrize(
    "form", [Provenance, Environment, RecordedGpu, Container, MeasuredMode, Files], ids=lambda one: one.__name__
)
def test_every_field_of_the_lock_stands_in_the_document(form: Any) -> None:
    table = DOCUMENT.read_text(encoding="utf-8").partition("## `trtx bench reproduce")[0]
    lacking = [
        one.name for one in fields(form) if f"`{one.name}`" not in table and f"provenance.{one.name}`" not in table
    ]
    assert not lacking, f"docs/provenance.md, What stands in it, lacks {lacking} of {form.__name__}"


def test_every_part_of_what_was_asked_stands_in_the_document() -> None:
    (row,) = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| asked |")]
    assert not [name for name in ExperimentSpec.model_fields if f"`{name}`" not in row]
