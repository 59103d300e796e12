"""What runs are compared by: each difference by its name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judged_runs import GOLDEN, conditions_of_kept, provenance

from trtx.errors import UsageError
from trtx.experiment import load_sweep
from trtx.experiment.baselines.conditions import Conditions, conditions_of, differences, refuse_others, unchecked
from trtx.experiment.bench.resumption import read_recorded
from trtx.experiment.directory import read_lock
from trtx.experiment.provenance import read_dataset
from trtx.runs.forms import Deployment, Provenance
from trtx.topology import ProcessSpec

_VALUES = st.none() | st.integers(0, 9) | st.sampled_from("xyz") | st.lists(st.sampled_from("xyz"), max_size=2)
_GROUPS = st.dictionaries(st.sampled_from(["a", "b", "c"]), _VALUES, max_size=3)
_CONDITIONS = st.builds(Conditions, _GROUPS, _GROUPS, _GROUPS, _GROUPS, _GROUPS, _GROUPS)
_GROUP = st.sampled_from(["model", "load", "machine", "topology", "versions", "eval"])


@given(_CONDITIONS)
def test_a_run_does_not_differ_from_itself(conditions: Conditions) -> None:
    assert differences(conditions, conditions) == ()


@given(_CONDITIONS, _CONDITIONS, _GROUP)
def test_whatever_differs_is_named_on_whichever_side_it_stands(one: Conditions, other: Conditions, group: str) -> None:
    found = {difference.name for difference in differences(one, other)}
    assert found == {difference.name for difference in differences(other, one)}
    changed = replace(one, **{group: getattr(one, group) | {"new": {"inner": 1}}})
    expected = [(f"{group}.new.inner", None, 1)]
    if group == "topology" and one.topology:  # one that only a side served
        expected = [("topology.new", "not served", "served")]
    elif group in ("load", "eval") and not getattr(one, group):  # one side has none, so nothing of it differs
        expected = []
    assert [(each.name, each.before, each.now) for each in differences(one, changed)] == expected


@given(_CONDITIONS, _CONDITIONS)
def test_what_makes_figures_incomparable_comes_first(one: Conditions, other: Conditions) -> None:
    groups = [difference.group in ("model", "load", "machine") for difference in differences(one, other)]
    assert groups == sorted(groups, reverse=True)


DEPLOYMENT = Deployment(
    url="http://127.0.0.1:9", model="tiny", server="vLLM", server_version="0.9", engine=None, versions=None,
    workers=None, gpu_names=("NVIDIA H100", "NVIDIA H100"), gpu_count=2, api_key_from=None,
)  # fmt: skip


def _of(deployment: Deployment) -> Provenance:
    kept = provenance(GOLDEN)
    return replace(kept, environment=replace(kept.environment, deployment=deployment))


def test_a_dataset_is_the_same_by_what_it_holds(tmp_path: Path) -> None:
    def of(name: str, content: str, kind: str = "file") -> Conditions:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if kind == "directory":
            path.mkdir()
        (path / "records" if kind == "directory" else path).write_text(content)
        load = {"input_file": str(path), "custom_dataset_type": "random_pool"}
        spec = load_sweep(None, {"load": load})
        return conditions_of(spec, {}, replace(_of(DEPLOYMENT), dataset_sha256=read_dataset(spec.load)))

    first = of("a.jsonl", "1")
    assert differences(first, of("elsewhere/b.jsonl", "1")) == ()
    assert [one.name for one in differences(first, of("a.jsonl", "2"))] == ["load.input_file"]
    assert differences(of("pool", "1", "directory"), of("other-pool", "1", "directory")) == ()
    assert differences(of("third-pool", "1", "directory"), of("fourth-pool", "2", "directory"))
    plain = conditions_of(load_sweep(None, {}), {}, _of(DEPLOYMENT))
    assert plain.load["input_file"] is None


def test_of_an_attached_run_they_are_those_of_the_deployment() -> None:
    spec = load_sweep(None, {"attach": {"url": "http://127.0.0.1:9"}})
    told = _of(DEPLOYMENT)
    found = conditions_of(spec, {}, told)
    assert found.model == {"name": "tiny", "weights": None} and found.machine["gpus"] == ["NVIDIA H100"]
    assert found.topology["server"] == "vLLM" and found.topology["gpu_count"] == 2
    assert unchecked(found, found) == ("model.weights",)
    unknown = conditions_of(spec, {}, _of(replace(DEPLOYMENT, gpu_names=None)))
    assert [one.name for one in differences(found, unknown)] == ["machine.gpus"]
    assert str(differences(found, unknown)[0]) == "machine.gpus was NVIDIA H100 and is not known"


def test_of_a_run_that_serves_they_are_the_plans_and_no_number_of_trials() -> None:
    found = conditions_of_kept(GOLDEN)
    assert found.model["name"] == "tiny-trained" and found.model["weights"]
    assert found.topology["agg"]["engine"] == "paced" and found.topology["disagg"]["workers"] == {
        "prefill": 1,
        "decode": 1,
    }
    assert found.topology["agg"]["router"][:2] == ["--router-mode", "round-robin"]
    assert found.load["seed"] == 7 and not {"trials", "concurrency", "request_count"} & found.load.keys()


def test_encode_workers_on_the_gpu_of_another_are_told_from_those_on_their_own() -> None:
    spec = read_lock(GOLDEN)
    plans, told = read_recorded(GOLDEN, spec).plans, provenance(GOLDEN)
    (frontend, worker) = (plans["agg"].processes[0], replace(plans["agg"].workers[0], gpu_indices=(0,)))

    def of(*encoders: int) -> Conditions:
        encode = [
            replace(worker, name=f"encode-{at}", role="encode", gpu_indices=(gpu,)) for at, gpu in enumerate(encoders)
        ]
        plan = replace(plans["agg"], processes=(frontend, worker, *encode))
        return conditions_of(spec, {**plans, "agg": plan}, told)

    assert [one.name for one in differences(of(1), of(0))] == ["topology.agg.encode_shared"]
    assert of(0, 1, 0).topology["agg"]["encode_shared"] == 2
    assert "encode_shared" not in of().topology["agg"], "it has no encode workers at all"


def test_workers_that_share_weights_are_told_from_those_with_a_copy_each() -> None:
    spec = read_lock(GOLDEN)
    plans, told = read_recorded(GOLDEN, spec).plans, provenance(GOLDEN)
    frontend, worker = plans["agg"].processes[0], plans["agg"].workers[0]
    sharing = replace(worker, argv=(*worker.argv, "--weight-group", worker.name, "--weight-engines", "2"))

    def of(*workers: ProcessSpec) -> Conditions:
        plan = replace(plans["agg"], processes=(frontend, *workers))
        return conditions_of(spec, {**plans, "agg": plan}, told)

    assert [one.name for one in differences(of(worker), of(sharing))] == ["topology.agg.share_weights"]
    assert of(sharing).topology["agg"]["share_weights"] == 2


def test_topologies_of_several_models_are_compared_each_by_its_own() -> None:
    spec = read_lock(GOLDEN)
    plans, told = read_recorded(GOLDEN, spec).plans, provenance(GOLDEN)
    one = conditions_of(spec, plans, told)
    other_model = {label: replace(told.measured[label], model=f"{label}-model") for label in told.measured}
    several = conditions_of(spec, plans, replace(told, measured=other_model))
    assert {label: model["name"] for label, model in several.model.items()} == {
        "agg": "agg-model",
        "disagg": "disagg-model",
    }
    assert not unchecked(several, several)

    swapped = replace(told, measured={**other_model, "disagg": replace(told.measured["disagg"], model="a third")})
    found = [str(one) for one in differences(several, conditions_of(spec, plans, swapped))]
    assert found == ["model.disagg.name was disagg-model and is a third"]
    with pytest.raises(UsageError, match="model.agg.name was not known and is agg-model"):
        refuse_others("main", differences(one, several), ())
