"""The routes of parity: what each is served as, and what has to be counted before it counts as one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtx.config import TopologySpec
from trtx.errors import UsageError
from trtx.evals.parity import Answer
from trtx.evals.parity.forms import Evidence
from trtx.experiment.parity_evidence import Reading, evidence_of
from trtx.experiment.parity_spec import ParitySpec, Route, dtype_of, parity_of
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


def answers(**fields: Any) -> list[Answer]:
    one = Answer(0, (7,), (-0.5,), ({"7": -0.5},), (), "length", 100, 0, {}, None, 1, None)
    return [replace(one, index=index, **fields) for index in range(10)]


def reading(route: str, per_worker: list[dict[str, float]], **fields: Any) -> Reading:
    workers = dict(zip(NAMES.get(route, ("agg-0",)), per_worker, strict=True))
    return Reading(workers, **{"migrations": 0, "max_num_tokens": 32, **fields})


def evidence(plans: dict[str, Plan], route: Route, after: Reading, killed: str | None = None, **of: Any) -> Evidence:
    before = Reading({name: dict.fromkeys(found or {}, 0.0) for name, found in after.workers.items()}, 0, 32)
    return evidence_of(route, plans[route], before, after, answers(**of), killed)


def handoffs(reads: float, recomputed: float = 0) -> list[dict[str, float]]:
    return [
        {"trtx_handoff_reads_total": 0, "trtx_recomputed_prefixes_total": 0},
        {"trtx_handoff_reads_total": reads, "trtx_recomputed_prefixes_total": recomputed},
    ]


@pytest.mark.parametrize(
    ("counted", "missing"),
    [
        (handoffs(10), None),
        (handoffs(12), None),
        (handoffs(9), "10 requests were answered with 9 handoffs"),
        (handoffs(10, recomputed=1), "1 prompts were computed by a decode worker in place of a handoff"),
        ([{}, {}], "the workers do not count their handoffs"),
        ([handoffs(10)[0], {}], "the workers do not count their handoffs"),
    ],
)
def test_disagg_needs_a_handoff_for_each_request(
    plans: dict[str, Plan], counted: list[dict[str, float]], missing: str | None
) -> None:
    assert evidence(plans, "disagg", reading("disagg", counted)).missing == missing


@pytest.mark.parametrize(
    ("shares", "cached", "missing"),
    [
        ((7, 3), 32, None),
        ((10, 0), 32, "the router sent every request to one worker"),
        ((7, 3), 0, "no request found KV, so the router had nothing to choose by"),
    ],
)
def test_kv_needs_a_router_that_had_a_choice(
    plans: dict[str, Plan], shares: tuple[int, int], cached: int, missing: str | None
) -> None:
    after = reading("kv", [{"trtx_requests_total": float(share)} for share in shares])
    assert evidence(plans, "kv", after, cached_tokens=cached).missing == missing


@pytest.mark.parametrize(
    ("killed", "migrations", "missing"),
    [
        ("agg-1", 4, None),
        ("agg-1", 0, "agg-1 was killed, and no stream of it went on elsewhere"),
        ("agg-1", None, "agg-1 was killed, and no stream of it went on elsewhere"),
        (None, 0, "no worker was killed: all streams had ended before; ask for longer answers with --osl"),
    ],
)
def test_migrated_needs_a_kill_and_streams_that_went_on(
    plans: dict[str, Plan], killed: str | None, migrations: int | None, missing: str | None
) -> None:
    after = reading("migrated", [{}, {}], migrations=migrations)
    assert evidence(plans, "migrated", after, killed).missing == missing


@pytest.mark.parametrize(
    ("most", "cached", "missing"),
    [
        (32, 0, None),
        (99, 0, None),
        (100, 0, "no prompt had more than 100 tokens to compute"),
        (32, 96, "no prompt had more than 32 tokens to compute"),
        (None, 0, "the workers do not publish how many tokens a step takes"),
    ],
)
def test_chunked_needs_prompts_that_no_step_could_hold(
    plans: dict[str, Plan], most: int | None, cached: int, missing: str | None
) -> None:
    after = reading("chunked", [{}], max_num_tokens=most)
    assert evidence(plans, "chunked", after, cached_tokens=cached).missing == missing


def test_a_prompt_longer_than_a_worker_takes_is_refused(plans: dict[str, Plan], tmp_path: Path) -> None:
    from trtx.experiment.parity_spec import check_lengths

    with pytest.raises(UsageError, match=r"--isl 8000 and --osl 400 make 8400 tokens"):
        check_lengths(parity_of({"isl": 8000, "osl": 400}), plans["agg"])
