"""Which trials of a run that ended early hold, what is moved away, and when going on is refused."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from trtx.bench import LoadSpec, cell_directory, read_cells, trial_directory
from trtx.bench.digests import digests_of
from trtx.bench.journal import Journal, TrialEnded
from trtx.bench.records import RECORDS_FILE
from trtx.errors import UsageError
from trtx.experiment import load_sweep
from trtx.experiment.bench import resumption
from trtx.experiment.directory import create, hold, read_lock, write_lock
from trtx.experiment.provenance import read_dataset
from trtx.launch import prepare
from trtx.runs.forms import LOCK, Deployment, Environment, Provenance, RecordedGpu

NOON = datetime(2026, 3, 4, 12, 0, 0, tzinfo=UTC)
CONDITIONS = Environment(
    started_at=NOON, command="trtx bench", commit=None, commit_changes=None, trtx_sources="abc", python="3.11.7",
    versions={"torch": "2.13.0", "aiperf": "0.13.0"}, torch_cuda=None, platform="Linux-6.1", os=None, container=None,
    cpu="EPYC", cpu_cores=4, memory_bytes=2**34, memory_limit_bytes=None, load_average=0.1, gpus=(), sm_clocks_mhz=(),
    gpu_driver=None, driver_cuda=None,
    deployment=Deployment(
        url="http://127.0.0.1:9", model="tiny", server="NVIDIA Dynamo", server_version="1.4.2", engine=None,
        versions=None, workers={"prefill": 1, "decode": 2}, gpu_names=None, gpu_count=None, api_key_from=None,
    ),
)  # fmt: skip
ATTACH = {
    "attach": {"url": "http://127.0.0.1:9"},
    "load": {"concurrency": [1, 2, 4], "request_count": 5, "warmup_request_count": 0},
}


def recorded(parent: Path, sweep: dict[str, Any] = ATTACH) -> resumption.Recorded:
    """A run directory as it is after its files were written and before anything was measured."""
    spec = load_sweep(None, sweep)
    run_dir = create(parent, spec, NOON)
    write_lock(run_dir, spec, Provenance(CONDITIONS, {}))
    return resumption.read_recorded(run_dir, read_lock(run_dir))


def measured(
    run_dir: Path, concurrency: int, trial: int = 1, *, failed: int = 0, requests: int = 5, ended: bool = True
) -> Path:
    """A trial as aiperf leaves it. ``ended``: with the file that it writes last."""
    directory = trial_directory(cell_directory(run_dir, f"attached-c{concurrency}"), trial)
    directory.mkdir(parents=True)
    lines = [
        {
            "metadata": {"benchmark_phase": "profiling", "request_start_ns": 0, "request_end_ns": 10**9},
            "metrics": {},
            "error": {"code": 500, "type": "Error", "message": "boom"} if n < failed else None,
        }
        for n in range(requests)
    ]
    (directory / RECORDS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    if ended:
        (directory / ".aiperf_results_ready.json").write_text("{}")
    return directory


def missing(run: resumption.Recorded) -> list[tuple[int, int]]:
    trials = [trial for step in resumption.missing_steps(run) for trial in step.trials]
    return [(trial.load.concurrency, trial.number) for trial in trials]


def test_a_spec_survives_its_lock(tmp_path: Path) -> None:
    spec = load_sweep(None, {"modes": ["agg", "disagg"], "topology": {"engine": "paced", "overrides": ["a=1"]}})
    write_lock(tmp_path, spec, Provenance(CONDITIONS, {}))
    assert read_lock(tmp_path) == spec


def test_trials_with_all_their_records_hold_failed_requests_or_not_and_others_are_missing(tmp_path: Path) -> None:
    run = recorded(tmp_path, {**ATTACH, "load": {**ATTACH["load"], "trials": 2}})
    assert missing(run) == [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]
    measured(run.run_dir, 1)
    measured(run.run_dir, 1, 2, requests=3)
    measured(run.run_dir, 2, failed=3)
    measured(run.run_dir, 2, 2, ended=False)
    measured(run.run_dir, 4, 2, failed=5, ended=False)  # aiperf writes no result where all failed
    assert missing(run) == [(4, 1), (1, 2), (2, 2)]


def test_a_trial_whose_records_are_gone_or_cut_is_missing(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    (measured(run.run_dir, 1) / RECORDS_FILE).unlink()
    with (measured(run.run_dir, 2) / RECORDS_FILE).open("r+") as records:
        records.truncate(100)
    measured(run.run_dir, 4)
    assert missing(run) == [(1, 1), (2, 1)]


def test_a_trial_whose_records_are_others_than_it_left_is_missing(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    for concurrency in (1, 2, 4):
        trial = measured(run.run_dir, concurrency)
        files = digests_of(trial) if concurrency != 4 else None  # which an older run did not note
        ended = TrialEnded(cell=f"attached-c{concurrency}", trial=1, aiperf_exit_code=0, restarted=None, files=files)
        Journal(run.run_dir).note(ended)
        if concurrency != 1:
            text = (trial / RECORDS_FILE).read_text()
            (trial / RECORDS_FILE).write_text(text.replace("1000000000", "2000000000"))
    assert missing(run) == [(2, 1)]
    told = "attached-c2/trial-01/profile_export.jsonl has different content from when the trial ended"
    assert resumption.changed_files(run) == (told,)
    (trial_directory(cell_directory(run.run_dir, "attached-c2"), 1) / RECORDS_FILE).write_text("{}\n[")  # no record
    assert missing(run) == [(2, 1)]
    (changed,) = resumption.changed_files(run)
    assert changed.startswith("attached-c2/trial-01/profile_export.jsonl has 4 bytes, but had ")
    (trial_directory(cell_directory(run.run_dir, "attached-c2"), 1) / RECORDS_FILE).unlink()
    assert resumption.changed_files(run) == ("attached-c2/trial-01/profile_export.jsonl is gone",)
    resumption.clear_the_way(run, resumption.missing_steps(run))
    assert resumption.changed_files(run) == (), "set aside by us, which nobody has to be told"


def test_trials_that_hold_become_cells_and_what_is_left_of_others_is_set_aside_by_each_attempt(tmp_path: Path) -> None:
    run = recorded(tmp_path, {**ATTACH, "load": {**ATTACH["load"], "trials": 2}})
    measured(run.run_dir, 1)
    for attempt in ("1", "2"):
        begun = measured(run.run_dir, 1, 2, ended=False).relative_to(run.run_dir)
        resumption.clear_the_way(run, resumption.missing_steps(run))
        (cell,) = read_cells(run.run_dir)
        assert (cell.name, [trial.number for trial in cell.trials]) == ("attached-c1", [1])
        assert (run.run_dir / cell_directory(run.run_dir, "attached-c1") / "trial-01" / RECORDS_FILE).exists()
        assert not (run.run_dir / begun).exists()
        assert (run.run_dir / "attempts" / attempt / begun / RECORDS_FILE).exists()
        assert missing(run) == [(2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]


def test_nothing_missing_leaves_every_file_where_it_is(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    for concurrency in (1, 2, 4):
        measured(run.run_dir, concurrency)
    resumption.clear_the_way(run, ())  # which writes the cells
    before = {path: path.read_bytes() for path in run.run_dir.rglob("*") if path.is_file()}
    assert resumption.missing_steps(run) == ()
    resumption.clear_the_way(run, ())
    assert {path: path.read_bytes() for path in run.run_dir.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"trtx_sources": "def"}, "trtx_sources was abc and is def"),
        ({"versions": {"torch": "2.11.0", "aiperf": "0.13.0"}}, "versions torch was 2.13.0 and is 2.11.0"),
        ({"cpu_cores": 8}, "cpu_cores was 4 and is 8"),
        ({"gpus": (RecordedGpu("GPU-1", "H100", 2**36, 1980, None, 700.0),)}, "H100"),
    ],
)
def test_other_conditions_are_refused_by_name(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    run = recorded(tmp_path)
    of_this_start: dict[str, Any] = {"platform": "Linux-6.2", "load_average": 3.0, "commit": "1"}
    resumption.check_conditions(run, replace(CONDITIONS, **of_this_start, sm_clocks_mhz=(345,)))
    with pytest.raises(UsageError) as raised:
        resumption.check_conditions(run, replace(CONDITIONS, **change))
    assert words in str(raised.value) and "start a new run" in str(raised.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "other"}, "model was tiny and is other"),
        ({"server_version": "1.5.0"}, "server_version was 1.4.2 and is 1.5.0"),
        ({"workers": {"prefill": 1, "decode": 3}}, "workers decode was 2 and is 3"),
    ],
)
def test_another_deployment_is_refused_by_what_it_tells_of_itself(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    run = recorded(tmp_path)
    resumption.check_deployment(run, run.deployment)
    with pytest.raises(UsageError) as raised:
        resumption.check_deployment(run, replace(run.deployment, **change))
    assert words in str(raised.value) and "start a new run" in str(raised.value)


def _of_dataset(parent: Path, dataset: Path, sha256: str | None) -> resumption.Recorded:
    spec = load_sweep(None, {**ATTACH, "load": {"input_file": str(dataset), "concurrency": [1]}})
    run_dir = create(parent, spec, NOON)
    write_lock(run_dir, spec, Provenance(CONDITIONS, {}, sha256))
    return resumption.read_recorded(run_dir, read_lock(run_dir))


def test_a_dataset_that_changed_is_refused_by_what_it_holds(tmp_path: Path) -> None:
    dataset = tmp_path / "chats.jsonl"
    dataset.write_text('{"text": "a"}\n')
    run = _of_dataset(tmp_path / "runs", dataset, read_dataset(LoadSpec(input_file=dataset)))
    resumption.check_dataset(run)
    resumption.check_dataset(recorded(tmp_path / "others"))  # there is none
    os.utime(dataset, (1, 1))
    resumption.check_dataset(run)
    dataset.write_text('{"text": "b"}\n')
    with pytest.raises(
        UsageError, match=r"its cells would not be comparable; .*: the content of input_file .*chats\.jsonl has changed"
    ):
        resumption.check_dataset(run)
    dataset.unlink()
    with pytest.raises(UsageError, match=r"chats\.jsonl can't be read \(No such file or directory\); check its path"):
        resumption.check_dataset(run)


def test_a_dataset_that_an_older_run_did_not_hash_is_taken_as_it_is(tmp_path: Path) -> None:
    dataset = tmp_path / "chats.jsonl"
    dataset.write_text('{"text": "a"}\n')
    resumption.check_dataset(_of_dataset(tmp_path / "runs", dataset, None))


def test_a_killed_sweep_is_collected_per_worker_as_it_was_counted(tmp_path: Path) -> None:
    target = recorded(tmp_path).target("attached")
    assert (target.url, target.model, target.gpu_count, target.worker_count) == ("http://127.0.0.1:9", "tiny", None, 3)


def test_an_attached_run_without_its_deployment_can_not_be_gone_on_with(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    write_lock(run.run_dir, run.spec, Provenance(replace(CONDITIONS, deployment=None), {}))
    with pytest.raises(
        UsageError, match=r"run\.lock\.yaml does not say which deployment was measured.*start a new run"
    ):
        resumption.read_recorded(run.run_dir, run.spec).target("attached")


def test_another_topology_is_refused_with_what_differs(tmp_path: Path) -> None:
    spec = load_sweep(None, {"topology": {"engine": "paced", "model": "synthetic:tiny"}})
    plan = prepare(spec.topologies[0].spec, run_dir=tmp_path / "agg")
    prints = {"agg": resumption.fingerprint(plan.model_path)}
    run = resumption.Recorded(tmp_path, spec, {"agg": plan}, prints, CONDITIONS, None)
    resumption.check_plan(run, "agg", plan)
    config = {"agg": {**plan.engine_configs["agg"], "max_batch_size": 3}}
    for other, words in (
        (replace(plan, engine_configs=config), "max_batch_size was"),
        (replace(plan, engine="torch"), "engine of agg was paced and is torch"),
        (replace(plan, processes=(*plan.processes, plan.processes[-1])), "workers of agg agg was 1 and is 2"),
    ):
        with pytest.raises(UsageError, match=words):
            resumption.check_plan(run, "agg", other)
    with pytest.raises(UsageError, match="have changed"):
        resumption.check_plan(replace(run, checkpoints={"agg": "other"}), "agg", plan)


def test_only_one_trtx_measures_in_a_run(tmp_path: Path) -> None:
    run_dir = recorded(tmp_path).run_dir
    with hold(run_dir), pytest.raises(UsageError, match="another trtx measures"), hold(run_dir):
        pass
    with hold(run_dir):
        pass


@pytest.mark.parametrize(
    "text", [None, "[]", "schema_version: 1\n", "modes: [agg]\n", "{", f"schema_version: {LOCK.version}\nx: 1\n"]
)
def test_a_directory_that_is_no_run_of_this_trtx_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "run.lock.yaml").write_text(text)
    with pytest.raises(UsageError) as raised:
        read_lock(tmp_path)
    assert "run.lock.yaml" in str(raised.value) and "\n" not in str(raised.value)


def test_a_run_that_ended_as_it_was_planned_is_refused_and_told_from_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(UsageError, match=r"ended before anything was measured, so it can't be resumed"):
        read_lock(tmp_path)


def test_a_run_that_ended_before_its_records_were_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"plan\.json can't be read .*start a new run"):
        recorded(tmp_path, {"topology": {"engine": "paced"}})
