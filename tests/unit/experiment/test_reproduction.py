"""A run made again from its lock: what differs here is told by its name in the lock, what can't be made is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from loopback import Handler, serving

from trtx.checkpoint import resolve_checkpoint
from trtx.errors import UsageError
from trtx.experiment import ExperimentSpec, differences_here, load_sweep, read_locked, spec_to_run
from trtx.experiment.baselines.conditions import differing
from trtx.experiment.deployment import ask_deployment
from trtx.experiment.directory import write_lock
from trtx.experiment.environment import environment
from trtx.experiment.provenance import provenance_of
from trtx.experiment.targets import attached_target
from trtx.launch import prepare
from trtx.runs.forms import LOCK, Difference

pytestmark = pytest.mark.slow

LOAD = {"concurrency": [1, 2], "request_count": 5}
PACED = {"topology": {"engine": "paced", "port": 0}, "load": LOAD}


def lock(directory: Path, sweep: dict[str, Any] = PACED) -> Path:
    """Of a run of this machine, as `trtx bench` writes it before anything is started; then carried away."""
    spec = load_sweep(None, sweep)
    plans = {one.label: prepare(one.spec, run_dir=directory / one.label) for one in spec.topologies}
    here = environment(["trtx", "bench"], datetime.now(UTC))
    write_lock(directory, spec, provenance_of(spec, here, dict(plans), None))
    return (directory / LOCK.file).rename(directory / "of-a-job.yaml")


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    document = yaml.safe_load(path.read_text())
    change(document)
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> str:
    return lock(tmp_path_factory.mktemp("lock")).read_text()


@pytest.fixture
def copy(kept: str, tmp_path: Path) -> Path:
    path = tmp_path / "copy.yaml"
    path.write_text(kept)
    return path


def test_nothing_differs_where_nothing_changed(copy: Path) -> None:
    locked = read_locked(copy)
    assert differences_here(locked) == ()
    assert spec_to_run(locked, copy.parent) == locked.spec
    assert locked.spec == load_sweep(None, PACED)


def test_what_changed_is_told_with_both_values_and_what_one_start_has_is_not(copy: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        before, agg = document["provenance"]["environment"], document["provenance"]["measured"]["agg"]
        before |= {"cpu_cores": 64, "load_average": 99.0, "command": "other", "driver_cuda": "13.0"}
        before["started_at"] = "2020-01-01T00:00:00Z"
        before["versions"] |= {"torch": "2.11.0", "tensorrt-llm": "1.3.0"}
        before["gpus"] = [
            {
                "uuid": "GPU-1", "name": "H100", "memory_bytes": 2**36, "max_sm_clock_mhz": 1980,
                "application_sm_clock_mhz": None, "power_limit_w": 700.0,
            }
        ]  # fmt: skip
        del before["versions"]["aiperf"]
        agg["files"]["sampled_sha256"] = "0" * 64
        agg["engine_configs"]["agg"]["max_batch_size"] = 3
        agg["aiperf"]["agg-c2"] = agg["aiperf"]["agg-c2"].replace("--concurrency 2", "--concurrency 3 --new-flag")
        agg["aiperf"]["agg-c2"] = agg["aiperf"]["agg-c2"].replace("http://127.0.0.1", "http://elsewhere")

    found = {one.name: (one.before, one.now) for one in differences_here(read_locked(edit(copy, change)))}
    expected = {
        "cpu_cores": "64", "driver_cuda": "13.0", "versions.torch": "2.11.0", "versions.tensorrt-llm": "1.3.0",
        "versions.aiperf": None, "gpus.0.uuid": "GPU-1", "gpus.0.name": "H100", "gpus.0.memory_bytes": str(2**36),
        "gpus.0.max_sm_clock_mhz": "1980", "gpus.0.power_limit_w": "700.0", "agg.files.sampled_sha256": "0" * 64,
        "agg.engine_configs.agg.max_batch_size": "3", "agg.aiperf.agg-c2.--concurrency": "3",
        "agg.aiperf.agg-c2.--new-flag": "given",
    }  # fmt: skip
    assert {what: then for what, (then, _) in found.items()} == expected
    assert found["agg.aiperf.agg-c2.--concurrency"][1] == "2" and found["agg.aiperf.agg-c2.--new-flag"][1] is None
    assert found["versions.tensorrt-llm"][1] is None and found["versions.aiperf"][1] is not None


def test_a_dataset_that_holds_something_else_is_told_by_its_hash(tmp_path: Path) -> None:
    dataset = tmp_path / "chats.jsonl"
    dataset.write_text('{"text": "a"}\n')
    load = {"input_file": str(dataset), "concurrency": [1], "request_count": 5, "warmup_request_count": 0}
    locked = read_locked(lock(tmp_path, {**PACED, "load": load}))
    assert differences_here(locked) == ()
    dataset.write_text('{"text": "b"}\n')
    (difference,) = differences_here(locked)
    assert difference.name == "dataset_sha256"
    assert difference.before is not None and difference.now is not None and difference.before != difference.now


FACTS = st.dictionaries(st.text("abc.", max_size=3), st.text("xy", max_size=2), max_size=6)


@given(FACTS, FACTS)
def test_a_difference_is_whatever_stands_on_one_side_alone_or_has_another_value(
    then: dict[str, str], here: dict[str, str]
) -> None:
    found = {one.name: one for one in differing(then, here)}
    assert found.keys() == {what for what in then.keys() | here.keys() if then.get(what) != here.get(what)}
    assert all(one == Difference(what, then.get(what), here.get(what)) for what, one in found.items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda document: document["provenance"]["measured"]["agg"].update(engine="torch"),
            "engine of agg was torch and would be paced; install",
        ),
        (
            lambda document: document["provenance"]["measured"]["agg"].update(gpu_names=["H100", "H100"]),
            "number of GPUs of agg was 2 and would be 0; run it where there are as many",
        ),
        (
            lambda document: document["topology"].update(model="/no/such/model"),
            "model '/no/such/model' is not a directory on this machine",
        ),
        (
            lambda document: document["provenance"]["measured"]["agg"].update(model="qwen3-0.6b"),
            "model of agg was qwen3-0.6b and would be tiny-trained",
        ),
        (
            lambda document: document.update(modes=["agg", "disagg"], topologies=["agg", "disagg"]),
            r"provenance\.measured has agg; expected agg, disagg, its topologies",
        ),
        (lambda document: document["provenance"].update(measured={}), "has nothing; expected agg"),
        (lambda document: document["provenance"].pop("environment"), r"provenance\.environment is missing"),
        (lambda document: document["load"].pop("seed"), r"load\.seed is missing"),
        (
            lambda document: document.update(schema_version=1),
            f"schema_version 1, but this trtx reads 2 to {LOCK.version}",
        ),
    ],
)
def test_what_can_not_be_made_here_is_one_sentence_with_the_lock(
    copy: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    edit(copy, change)
    with pytest.raises(UsageError, match=words) as raised:
        differences_here(read_locked(copy))
    said = str(raised.value)
    assert "copy.yaml" in said and "\n" not in said and len(said) < 1000


def test_an_engine_that_auto_led_to_then_and_that_is_not_installed_is_refused(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtx.launch.preparation.installed_version", lambda: None)

    def change(document: dict[str, Any]) -> None:
        document["topology"]["engine"] = "auto"
        document["topology"]["overrides"] = []
        document["provenance"]["measured"]["agg"]["engine"] = "tensorrt-llm"

    with pytest.raises(UsageError, match=r"can't be reproduced here: engine tensorrt-llm needs the package"):
        differences_here(read_locked(edit(copy, change)))


def test_a_config_that_was_named_and_is_gone_comes_out_of_the_lock(tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text("max_batch_size: 5\nmax_num_tokens: 512\n")
    topology = {**PACED["topology"], "engine_configs": {"agg": str(config)}, "overrides": ["paced_itl_ms=5"]}
    path = lock(tmp_path, {**PACED, "topology": topology})
    assert spec_to_run(read_locked(path), tmp_path).topology.engine_configs == {"agg": config}

    config.unlink()
    locked = read_locked(path)
    assert differences_here(locked) == ()
    once, again = (spec_to_run(locked, tmp_path / "runs") for _ in range(2))
    written = once.topology.engine_configs["agg"]
    assert once == again and written.is_relative_to(tmp_path / "runs")
    config_of = ExperimentSpec.model_validate({**PACED, "topology": {**topology, "engine_configs": {"agg": written}}})
    plan = prepare(config_of.topologies[0].spec, run_dir=tmp_path / "agg")
    assert (plan.engine_configs["agg"]["max_batch_size"], plan.engine_configs["agg"]["paced_itl_ms"]) == (5, 5)

    config.write_text("max_batch_size: 6\nmax_num_tokens: 512\n")  # there again, and another
    assert [one.name for one in differences_here(locked)] == ["agg.engine_configs.agg.max_batch_size"]


class _Served(Handler):
    models = ("tiny",)

    def do_GET(self) -> None:
        self.answer(200 if self.path == "/v1/models" else 404, {"data": [{"id": name} for name in self.models]})


def test_an_attached_run_is_made_again_where_the_deployment_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Path(shutil.copytree(resolve_checkpoint("synthetic:tiny").path, tmp_path / "tokenizer"))
    with serving(_Served) as url:
        attach = {"url": url, "model": "tiny", "tokenizer": str(tokenizer)}
        spec = load_sweep(None, {"attach": attach, "load": LOAD})
        assert spec.attach is not None
        deployment = ask_deployment(spec.attach)
        here = environment([], datetime.now(UTC), deployment)
        write_lock(tmp_path, spec, provenance_of(spec, here, {}, attached_target(spec.attach, deployment)))
        locked = read_locked(tmp_path)
        (tokenizer / "more.safetensors").write_bytes(b"")  # weights are the other side's
        assert differences_here(locked) == ()
        (tokenizer / "tokenizer_config.json").write_text("{}")
        found = {one.name for one in differences_here(locked)}
        assert found == {"attached.files.total_bytes", "attached.files.sampled_sha256"}
        monkeypatch.setattr(_Served, "models", ("other",))
        with pytest.raises(UsageError, match="can't be reproduced here: model 'tiny' is not served"):
            differences_here(locked)
    with pytest.raises(UsageError, match="can't be reproduced here: http.* did not answer"):
        differences_here(locked)


def test_a_run_directory_stands_for_its_lock(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    copy.rename(tmp_path / "run" / LOCK.file)
    assert read_locked(tmp_path / "run").path == tmp_path / "run" / LOCK.file
    with pytest.raises(UsageError, match=r"run\.lock\.yaml can't be read"):
        read_locked(tmp_path)
