"""The routes of parity: what each is served as, and what has to be counted before it counts as one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtx.checkpoint import read_model_config
from trtx.config import TopologySpec
from trtx.errors import UsageError
from trtx.evals.parity import ParityAnswer
from trtx.evals.parity.forms import RouteEvidence
from trtx.experiment.parity.evidence import Reading, evidence_of
from trtx.experiment.parity.kill import Kill
from trtx.experiment.parity.spec import (
    ParitySpec,
    Route,
    check_fault,
    check_speculation,
    dtype_of,
    parity_of,
    widest_dtype,
)
from trtx.launch import prepare
from trtx.topology import Plan

NAMES = {"disagg": ("prefill-0", "decode-0"), "kv": ("agg-0", "agg-1"), "migrated": ("agg-0", "agg-1")}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    parent = tmp_path_factory.mktemp("plans")
    spec = ParitySpec(topology=TopologySpec.model_validate({"model": "synthetic:tiny", "port": 0}))
    return {one.label: prepare(one.spec, run_dir=parent / one.label) for one in spec.topologies}


def test_each_route_is_a_topology_of_its_own(plans: dict[str, Plan]) -> None:
    assert list(plans) == ["agg", "disagg", "kv", "migrated", "chunked"]
    assert {name: plan.expected_workers() for name, plan in plans.items()} == {
        "agg": {"agg": 1}, "disagg": {"prefill": 1, "decode": 1}, "kv": {"agg": 2}, "migrated": {"agg": 2},
        "chunked": {"agg": 1},
    }  # fmt: skip
    assert [name for name, plan in plans.items() if plan.routes_by_prefix] == ["kv"]
    config = plans["chunked"].engine_configs["agg"]
    assert (config["max_num_tokens"], config["enable_chunked_prefill"]) == (32, True)
    assert plans["agg"].engine_configs["agg"]["max_num_tokens"] > 256, "which cuts no prompt of the reference"
    assert dtype_of(plans["agg"]) == "float32"


def test_what_was_typed_holds_for_every_route() -> None:
    fields: dict[str, Any] = {
        "topology": {"workers": 3, "overrides": ["max_batch_size=4"]},
        "routes": ["chunked", "kv"],
    }
    found = {one.label: one.spec for one in parity_of(fields).topologies}
    assert list(found) == ["agg", "chunked", "kv"], "the reference is first, named or not"
    assert [one.workers for one in found.values()] == [1, 1, 3]
    assert all(one.overrides[0] == "max_batch_size=4" for one in found.values())
    assert parity_of({"concurrency": 64}).chunk_tokens == 128
    with pytest.raises(UsageError, match="^--isl 128 is no longer than max_num_tokens 128"):
        parity_of({"concurrency": 64, "isl": 128})


def test_a_speculating_worker_is_compared_with_one_that_does_not_speculate(tmp_path: Path) -> None:
    drafts = "speculative_config={decoding_type: SA, max_draft_len: 3}"
    topology = {"model": "synthetic:tiny", "port": 0, "overrides": [drafts]}
    asked = parity_of({"routes": ["speculating", "disagg"], "topology": topology})
    found = {one.label: prepare(one.spec, run_dir=tmp_path / one.label) for one in asked.topologies}
    speculates = {
        label: [bool(config.get("speculative_config")) for config in plan.engine_configs.values()]
        for label, plan in found.items()
    }
    assert speculates == {"agg": [False], "speculating": [True], "disagg": [True, True]}
    check_speculation(found["speculating"])
    with pytest.raises(UsageError, match="the route speculating needs an engine config with speculative_config"):
        check_speculation(found["agg"])


def answers(**fields: Any) -> list[ParityAnswer]:
    one = ParityAnswer(0, (7,), (-0.5,), ({"7": -0.5},), (), "length", 100, 0, {}, None, 1, None)
    return [replace(one, index=index, **fields) for index in range(10)]


def reading(route: str, per_worker: list[dict[str, float]], **fields: Any) -> Reading:
    workers = dict(zip(NAMES.get(route, ("agg-0",)), per_worker, strict=True))
    return Reading(workers, **{"migrations": 0, "max_num_tokens": 32, **fields})


def evidence(
    plans: dict[str, Plan], route: Route, after: Reading, kill: Kill | None = None, has_fault: bool = False, **of: Any
) -> RouteEvidence:
    before = Reading({name: dict.fromkeys(found or {}, 0.0) for name, found in after.workers.items()}, 0, 32)
    return evidence_of(route, plans[route], before, after, answers(**of), kill=kill, has_fault=has_fault)


READS, RECOMPUTED, WHOLE = "trtx_handoff_reads_total", "trtx_recomputed_prefixes_total", "trtx_whole_requests_total"


def handoffs(reads: float, recomputed: float = 0, whole: float = 0) -> list[dict[str, float]]:
    return [{READS: 0, RECOMPUTED: 0, WHOLE: 0}, {READS: reads, RECOMPUTED: recomputed, WHOLE: whole}]


@pytest.mark.parametrize(
    ("counted", "missing"),
    [
        (handoffs(10), None),
        (handoffs(12), None),
        (handoffs(9), "10 requests were answered with 9 handoffs"),
        (handoffs(10, recomputed=1), "1 prompts were computed by a decode worker in place of a handoff"),
        (handoffs(12, whole=2), "2 prompts were computed by a decode worker in place of a handoff"),
        ([{READS: 0, WHOLE: 0}, {READS: 12, WHOLE: 0}], None),  # TensorRT-LLM never recomputes
        ([{READS: 0, RECOMPUTED: 0}, {READS: 12, RECOMPUTED: 0}], "the workers do not count their handoffs"),
        ([{}, {}], "the workers do not count their handoffs"),
        ([handoffs(10)[0], {}], "the workers do not count their handoffs"),
    ],
)
def test_disagg_needs_a_handoff_for_each_request(
    plans: dict[str, Plan], counted: list[dict[str, float]], missing: str | None
) -> None:
    assert evidence(plans, "disagg", reading("disagg", counted)).missing == missing


def test_what_was_counted_before_a_worker_began_anew_is_not_known(plans: dict[str, Plan]) -> None:
    before, after = reading("disagg", handoffs(50)), reading("disagg", handoffs(10))
    found = evidence_of("disagg", plans["disagg"], before, after, answers())
    assert found.missing == "the workers do not count their handoffs"


@pytest.mark.parametrize(("counted", "corrupted"), [({"trtx_corrupted_handoffs_total": 3.0}, 3), ({}, None)])
def test_a_planted_fault_is_counted_by_who_plants_it(
    plans: dict[str, Plan], counted: dict[str, float], corrupted: int | None
) -> None:
    of_prefill, of_decode = handoffs(10)
    own = dict.fromkeys(counted, 0.0)
    found = evidence(plans, "disagg", reading("disagg", [of_prefill | own, of_decode | counted]), has_fault=True)
    assert found.corrupted == corrupted and found.counts[-1].value == corrupted
    assert evidence(plans, "disagg", reading("disagg", handoffs(10))).corrupted is None


@pytest.mark.parametrize(
    ("shares", "cached", "missing"),
    [
        ((7, 3), 32, None),
        ((10, 0), 32, "the router sent every request to one worker"),
        ((7, 3), 0, "no request found cached KV, so the router had no reason to choose a worker"),
        ((7, 3), None, "the answers do not report cached tokens"),
        ((7, None), 32, "the workers do not say how many requests they ended"),
    ],
)
def test_kv_needs_a_router_that_had_a_choice(
    plans: dict[str, Plan], shares: tuple[int, int | None], cached: int | None, missing: str | None
) -> None:
    counted = [None if share is None else {"trtx_requests_total": float(share)} for share in shares]
    after = reading("kv", counted)  # type: ignore[arg-type]
    found = evidence(plans, "kv", after, cached_tokens=cached)
    assert found.missing == missing
    assert found.counts[0].value == (None if cached is None else 10 * cached)


def test_a_worker_that_began_anew_says_not_how_many_requests_it_ended(plans: dict[str, Plan]) -> None:
    before, after = ([{"trtx_requests_total": one} for one in counts] for counts in ((40.0, 9.0), (7.0, 12.0)))
    found = evidence_of("kv", plans["kv"], reading("kv", before), reading("kv", after), answers(cached_tokens=32))
    assert [one.value for one in found.counts[1:]] == [None, 3]
    assert found.missing == "the workers do not say how many requests they ended"


OPEN = Kill("agg-1", frozenset({3, 4}))


@pytest.mark.parametrize(
    ("kill", "broken", "of", "missing"),
    [
        (OPEN, 4, {}, None),
        (OPEN, 0, {}, "agg-1 was killed, but the frontend saw none of its streams break"),
        (OPEN, None, {}, "the frontend does not say whether a stream broke"),
        (OPEN, 4, {"failure": "cut off"}, "agg-1 was killed, but none of its answers continued on another worker"),
        (OPEN, 4, {"attempts": 2}, "agg-1 was killed, but none of its answers continued on another worker"),
        (
            Kill("agg-1", frozenset({99})),
            4,
            {},
            "agg-1 was killed, but none of its answers continued on another worker",
        ),
        (None, 0, {}, "no worker was killed: all streams had ended before; ask for longer answers with --osl"),
    ],
)
def test_migrated_needs_a_kill_and_answers_that_went_on(
    plans: dict[str, Plan], kill: Kill | None, broken: int | None, of: dict[str, Any], missing: str | None
) -> None:
    after = reading("migrated", [{}, {}], migrations=broken)
    assert evidence(plans, "migrated", after, kill, **of).missing == missing


@pytest.mark.parametrize(
    ("most", "cached", "missing"),
    [
        (32, 0, None),
        (99, 0, None),
        (100, 0, "no prompt had more than 100 tokens to compute"),
        (32, 96, "no prompt had more than 32 tokens to compute"),
        (None, 0, "the workers do not publish how many tokens a step takes"),
        (32, None, "the answers do not report cached tokens"),
    ],
)
def test_chunked_needs_prompts_that_no_step_could_hold(
    plans: dict[str, Plan], most: int | None, cached: int | None, missing: str | None
) -> None:
    after = reading("chunked", [{}], max_num_tokens=most)
    assert evidence(plans, "chunked", after, cached_tokens=cached).missing == missing


@pytest.mark.parametrize("then", [{}, {"trtx_drafts_total": 0.0}], ids=["no step reported yet", "no draft yet"])
@pytest.mark.parametrize(
    ("drafts", "accepted", "missing"),
    [
        (9, 12, None),
        (9, None, "no drafted token was accepted; ask for longer answers with --osl"),
        (None, None, "the workers do not count drafts"),
    ],
)
def test_speculating_needs_an_accepted_draft(
    plans: dict[str, Plan], drafts: int | None, accepted: int | None, missing: str | None, then: dict[str, float]
) -> None:
    counted = {"trtx_drafts_total": drafts, "trtx_accepted_draft_tokens_total": accepted}
    after = Reading({"agg-0": {name: float(value) for name, value in counted.items() if value is not None}}, None, None)
    before = Reading({"agg-0": then}, None, None)
    found = evidence_of("speculating", plans["agg"], before, after, answers())
    assert found.missing == missing
    assert [one.value for one in found.counts[1:]] == [drafts, accepted or 0]


def test_a_prompt_longer_than_a_worker_takes_is_refused(plans: dict[str, Plan], tmp_path: Path) -> None:
    from trtx.experiment.parity.spec import check_lengths

    with pytest.raises(UsageError, match=r"--isl 8000 and --osl 400 make 8400 tokens"):
        check_lengths(parity_of({"isl": 8000, "osl": 400}), plans["agg"])


def test_a_fault_that_no_worker_could_have_is_refused_by_the_checkpoint(plans: dict[str, Plan]) -> None:
    layers = read_model_config(plans["disagg"].model_path).num_layers
    check_fault(f"swap-block:every=1,layer={layers - 1}", plans["disagg"])
    with pytest.raises(UsageError, match=rf"^TRTX_FAULT is .*layer={layers}, and tiny has {layers} layers; expected"):
        check_fault(f"swap-block:every=1,layer={layers}", plans["disagg"])
    with pytest.raises(UsageError, match=r"engine tensorrt-llm can't inject a fault; use torch"):
        check_fault("swap-block:every=1,layer=0", replace(plans["disagg"], engine="tensorrt-llm"))


def test_a_server_is_held_against_one_thing_and_takes_no_fault() -> None:
    url, other = {"url": "http://127.0.0.1:8000"}, {"url": "http://127.0.0.1:9000"}
    spec = parity_of({"routes": (), "attach": url, "against": other})
    assert spec.labels == ("against", "url") and spec.topologies == ()
    assert spec.passes == {"against": "against", "against-again": "against", "url": "url"}
    served = parity_of({"routes": (), "attach": url, "topology": {"model": "synthetic:tiny", "port": 0}})
    assert [(one.label, one.spec.mode, one.spec.workers) for one in served.topologies] == [("against", "agg", 1)]
    for fields in ({"attach": url}, {"routes": ()}, {"dtype": "float32"}, {"against": other}):
        with pytest.raises(UsageError):
            parity_of(fields)
    with pytest.raises(UsageError, match="a fault can't be injected into a running server"):
        parity_of({"routes": (), "attach": url, "against": other, "fault": "swap-block:every=1,layer=0"})


def test_rounding_is_that_of_the_side_that_rounds_more() -> None:
    assert widest_dtype("float32", "bfloat16") == "bfloat16" == widest_dtype("bfloat16")
    assert widest_dtype("float32", None) is None is widest_dtype("fp8")
