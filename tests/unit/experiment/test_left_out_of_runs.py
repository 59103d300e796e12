"""What an engine does not act on: in dry run, lock, conditions and report of a run, and no axis and no A/B of it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from trtx.bench.documents import plain
from trtx.cli.app import run
from trtx.errors import UsageError
from trtx.experiment import ExperimentSpec, load_sweep, plan_only
from trtx.experiment.baselines.conditions import Conditions, conditions_of, differences
from trtx.experiment.bench.ab import ab_spec
from trtx.experiment.bench.reproduction import read_locked, spec_to_run
from trtx.experiment.directory import write_lock
from trtx.experiment.environment import environment
from trtx.experiment.left_out import tell_left_out
from trtx.experiment.provenance import provenance_of
from trtx.launch import prepare
from trtx.report.conditions import conditions_of as shown_conditions
from trtx.runs.forms import LOCK, AskedRun, Provenance
from trtx.topology import Plan

pytestmark = pytest.mark.slow

GPU_BYTES = "kv_cache_config.max_gpu_total_bytes"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def asked(*overrides: str, **said: Any) -> ExperimentSpec:
    topology = {"model": "synthetic:tiny", "engine": "torch", "overrides": list(overrides)}
    return load_sweep(None, {"topology": topology, "load": {"concurrency": [1], "isl": [32], "osl": [8]}, **said})


def here(spec: ExperimentSpec, directory: Path) -> tuple[dict[str, Plan], Provenance]:
    plans = {one.label: prepare(one.spec, run_dir=directory / one.label) for one in spec.topologies}
    return plans, provenance_of(spec, environment((), datetime.now(UTC)), plans, None)


def locked(spec: ExperimentSpec, directory: Path) -> tuple[dict[str, Plan], Provenance]:
    directory.mkdir(exist_ok=True)
    plans, told = here(spec, directory)
    write_lock(directory, spec, told)
    return plans, told


def test_the_lock_has_it_as_left_out_and_not_as_in_force(tmp_path: Path) -> None:
    spec = asked(f"{GPU_BYTES}=5", "moe_config.backend=CUTLASS", modes=["agg", "disagg"])
    locked(spec, tmp_path)
    document = yaml.safe_load((tmp_path / LOCK.file).read_text())
    for label, roles in {"agg": ["agg"], "disagg": ["prefill", "decode"]}.items():
        measured = document["provenance"]["measured"][label]
        for role in roles:
            assert "moe_config" not in measured["engine_configs"][role]
            assert "max_gpu_total_bytes" not in measured["engine_configs"][role]["kv_cache_config"]
            assert measured["left_out"][role] == [
                {"field": GPU_BYTES, "value": 5, "source": "--set", "typed": True},
                {"field": "moe_config.backend", "value": "CUTLASS", "source": "--set", "typed": True},
            ]


def test_conditions_and_the_report_name_it_once(tmp_path: Path) -> None:
    spec = asked(f"{GPU_BYTES}=5", modes=["agg", "disagg"])
    plans, told = locked(spec, tmp_path)
    conditions = conditions_of(spec, plans, told)
    assert conditions.topology["agg"]["left_out"] == {"agg": {GPU_BYTES: 5}}
    assert conditions.topology["disagg"]["left_out"] == {"prefill": {GPU_BYTES: 5}, "decode": {GPU_BYTES: 5}}
    shown = {one.name: one.value for one in shown_conditions(LOCK.read(tmp_path, AskedRun), {}, (), ())}
    assert shown["Without effect on engine torch"] == f"{GPU_BYTES} 5 (--set)"


def test_a_baseline_that_was_left_something_out_differs_in_that_alone(tmp_path: Path) -> None:
    def of(*overrides: str) -> Conditions:
        spec = asked(*overrides)
        return conditions_of(spec, *here(spec, tmp_path))

    (difference,) = differences(of(f"{GPU_BYTES}=5"), of())
    assert difference.name == f"topology.agg.left_out.agg.{GPU_BYTES}"


def test_it_is_told_once_for_all_topologies(tmp_path: Path) -> None:
    plans, _ = here(asked(f"{GPU_BYTES}=5", modes=["agg", "disagg"]), tmp_path)
    lines: list[str] = []
    tell_left_out(plans, lines.append)
    (line,) = lines
    assert line.startswith(f"trtx: warning: engine torch does not act on {GPU_BYTES} (--set), so nothing that is")


def test_an_engine_that_computes_no_model_has_no_line_about_a_shipped_config(tmp_path: Path) -> None:
    plans, _ = here(asked(modes=["agg", "disagg"], topology={"model": "synthetic:tiny", "engine": "paced"}), tmp_path)
    lines: list[str] = []
    tell_left_out(plans, lines.append)
    assert lines == [] and all(plan.left_out for plan in plans.values())


@pytest.mark.parametrize(
    ("engine", "axis", "values"),
    [
        ("torch", f"overrides.{GPU_BYTES}", [0, 1000000000]),
        ("torch", f"overrides.{GPU_BYTES}", [5]),
        ("torch", "overrides.agg.scheduler_config.capacity_scheduler_policy", ["MAX_UTILIZATION", "STATIC_BATCH"]),
        ("torch", "overrides.enable_sleep", [True, False]),
        ("torch", "overrides.moe_config", [{"backend": "CUTLASS"}, {"backend": "TRTLLM"}]),
        ("torch", "overrides.attn_backend", ["TRTLLM", "FLASHINFER"]),
        ("torch", "overrides.return_perf_metrics", [True, False]),
        ("torch", "overrides.cuda_graph_config.batch_sizes", [[1], [2]]),
        ("paced", "overrides.kv_cache_config.tokens_per_block", [32, 64]),
        ("simulated", "overrides.max_seq_len", [512, 1024]),
    ],
)
def test_an_axis_over_a_field_that_the_engine_does_not_act_on_is_refused(
    engine: str, axis: str, values: list[Any], tmp_path: Path
) -> None:
    spec = load_sweep(
        None,
        {
            "topology": {"model": "synthetic:tiny", "engine": engine},
            "axes": {axis: values},
            "load": {"concurrency": [1], "isl": [32], "osl": [8]},
        },
    )
    with pytest.raises(UsageError, match=f"axes.{axis} has no effect, because engine {engine} ignores") as refused:
        plan_only(spec, parent=tmp_path)
    assert "same topology" in str(refused.value)


def test_topologies_that_differ_in_left_out_fields_alone_are_refused(tmp_path: Path) -> None:
    """A section in which the engine acts on some field, and these are the same."""
    values = [{"tokens_per_block": 32, "max_gpu_total_bytes": size} for size in (0, 5)]
    spec = asked(axes={"overrides.kv_cache_config": values}, topology={"model": "synthetic:tiny", "engine": "torch"})
    with pytest.raises(UsageError, match=f"differ in nothing but {GPU_BYTES}, which engine torch ignores"):
        plan_only(spec, parent=tmp_path)


def test_topologies_that_differ_in_what_the_engine_acts_on_are_measured(tmp_path: Path) -> None:
    spec = asked(f"{GPU_BYTES}=5", axes={"overrides.kv_cache_config.tokens_per_block": [32, 64]})
    assert len(plan_only(spec, parent=tmp_path).topologies) == 2


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("load_format", ["AUTO", "auto"]),
        ("max_batch_size", [8, "8"]),
        ("kv_cache_config", [{"tokens_per_block": 64}, {"tokens_per_block": 64, "enable_block_reuse": True}]),
        ("max_num_tokens", [None, 8192]),
        ("max_batch_size", [256, None]),
    ],
)
def test_topologies_that_differ_in_how_a_value_is_written_are_refused(
    field: str, values: list[Any], tmp_path: Path
) -> None:
    spec = asked(axes={f"overrides.{field}": values})
    with pytest.raises(UsageError, match="would be the same topology, measured twice.* mean the same"):
        plan_only(spec, parent=tmp_path)


def test_names_of_one_transport_are_one_topology(tmp_path: Path) -> None:
    spec = asked(modes=["disagg"], axes={"overrides.cache_transceiver_config.backend": ["UCX", "NIXL"]})
    with pytest.raises(UsageError, match="would be the same topology, measured twice"):
        plan_only(spec, parent=tmp_path)


def sweep(path: Path, **topology: Any) -> Path:
    said = {"model": "synthetic:tiny", "engine": "torch", **topology}
    path.write_text(yaml.safe_dump({"topology": said, "load": {"concurrency": [1], "isl": [32], "osl": [8]}}))
    return path


def test_an_ab_of_variants_that_are_served_alike_is_refused_and_an_aa_is_not(tmp_path: Path) -> None:
    plain = sweep(tmp_path / "a.yaml")
    cached = sweep(tmp_path / "b.yaml", overrides=[f"{GPU_BYTES}=1000000000"])
    again = sweep(tmp_path / "c.yaml", overrides=[f"{GPU_BYTES}=1000000000"])
    blocks = sweep(tmp_path / "d.yaml", overrides=["kv_cache_config.tokens_per_block=64"])
    with pytest.raises(UsageError, match=f"a and b would be the same topology, measured twice.* but {GPU_BYTES}"):
        plan_only(ab_spec(plain, cached, 2, {}), parent=tmp_path)
    for one, other in ((cached, again), (plain, blocks), (cached, blocks)):
        assert len(plan_only(ab_spec(one, other, 2, {}), parent=tmp_path).topologies) == 2


def test_a_run_that_is_made_again_without_its_files_names_the_same(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("moe_config: {backend: CUTLASS}\nkv_cache_config: {max_gpu_total_bytes: 5, tokens_per_block: 64}\n")
    topology = {"model": "synthetic:tiny", "engine": "torch", "engine_configs": {"agg": str(own)}}
    spec = asked(topology=topology)
    before, _ = locked(spec, tmp_path / "run")
    own.unlink()
    again = spec_to_run(read_locked(tmp_path / "run" / LOCK.file), tmp_path / "again")
    after, _ = here(again, tmp_path / "again")
    assert after["agg"].engine_configs == before["agg"].engine_configs
    values = [[(one.path, one.value, one.is_typed) for one in plans["agg"].left_out] for plans in (before, after)]
    assert sorted(values[0]) == sorted(values[1]) and len(values[0]) == 2


def test_a_lock_from_before_says_nothing_of_it(tmp_path: Path) -> None:
    _, told = locked(asked(f"{GPU_BYTES}=5"), tmp_path)
    document = {"schema_version": LOCK.version, **plain(told)}
    del document["measured"]["agg"]["left_out"]
    assert LOCK.restored(document, Provenance, "run.lock.yaml").measured["agg"].left_out is None


@pytest.mark.parametrize(
    "verb",
    [
        ["serve", "--port", "0"],
        ["bench", "--isl", "32", "--osl", "8"],
        ["export", "slurm", "--gpus-per-node", "0"],
        ["export", "kubernetes", "--gpus-per-node", "0", "--image", "registry.example/trtx:1"],
    ],
)
def test_a_dry_run_names_it(
    verb: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = [*verb, "--model", "synthetic:tiny", "--engine", "torch", "--set", f"{GPU_BYTES}=5", "--dry-run"]
    assert run(argv) == 0
    told = " ".join(capfd.readouterr().out.split())
    assert told.count(f"engine torch does not act on {GPU_BYTES} (--set)") == 1
