"""``--share-weights``: which workers share a GPU, which options each gets, and what can't be shared."""

from __future__ import annotations

import json
from typing import Any

import pytest
from planned_topologies import machine, plan_of

from trtx.errors import UsageError
from trtx.topology import Plan, weight_engines


def flags(argv: tuple[str, ...]) -> tuple[str | None, int]:
    """The name of a worker's group, and the number of workers in it."""
    name = argv[argv.index("--weight-group") + 1] if "--weight-group" in argv else None
    return name, weight_engines(argv)


@pytest.mark.parametrize(
    ("spec", "groups"),
    [
        ({"mode": "disagg"}, [["prefill-0", "decode-0"]]),
        ({"mode": "disagg", "prefill": 1, "decode": 3}, [["prefill-0", "decode-0"], ["decode-1", "decode-2"]]),
        ({"mode": "agg", "workers": 2, "encode": 1}, [["agg-0", "agg-1"]]),
        ({"mode": "agg", "workers": 4, "share_weights": 3}, [["agg-0", "agg-1", "agg-2"], ["agg-3"]]),
        ({"mode": "agg", "workers": 2, "share_weights": 8}, [["agg-0", "agg-1"]]),
    ],
)
def test_workers_of_a_group_are_on_one_gpu_and_others_on_their_own(
    spec: dict[str, Any], groups: list[list[str]]
) -> None:
    made = plan_of(machine(4), **{"share_weights": 2, **spec})
    by_name = {worker.name: worker for worker in made.workers}
    assert made.gpu_count == len(groups) + spec.get("encode", 0)
    gpus = []
    for group in groups:
        own = {by_name[name].gpu_indices for name in group}
        assert len(own) == 1
        gpus += own
        expected = (group[0], len(group)) if len(group) > 1 else (None, 1)
        assert {flags(by_name[name].argv) for name in group} == {expected}
        if len(group) > 1:
            assert f"{' and '.join(group)} share one copy of the weights because of --share-weights" in made.reasons
        for name in group[1:]:
            assert any(
                one.startswith(f"{name} on ") and one.endswith(f"because of --share-weights, together with {group[0]}")
                for one in made.reasons
            )
    assert len(gpus) == len(set(gpus))
    assert all(flags(worker.argv) == (None, 1) for worker in made.workers if worker.role == "encode")
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_without_gpus_a_group_shares_host_memory() -> None:
    made = plan_of(machine(0), mode="disagg", share_weights=2)
    assert [flags(worker.argv) for worker in made.workers] == [("prefill-0", 2)] * 2


def test_by_default_no_worker_shares() -> None:
    assert [flags(worker.argv) for worker in plan_of(machine(2), mode="disagg").workers] == [(None, 1)] * 2


@pytest.mark.parametrize(
    ("spec", "because"),
    [
        ({"mode": "disagg", "engine": "paced"}, "--share-weights 2 has no effect with --engine paced; use --engine"),
        ({"mode": "agg"}, "--share-weights 2 has no effect with one worker; use --workers 2, or leave it out"),
        ({"mode": "disagg", "encode_shared": 1}, "--share-weights 2 and --encode-shared would both divide a GPU's"),
        ({"mode": "disagg", "tp": 2}, "prefill: --share-weights 2: tensor_parallel_size is 2, and weights are shared"),
        (
            {"mode": "disagg", "values": {"sleep_config": {}}},
            "prefill: --share-weights 2: sleep_config would release weights that other workers use; leave one of",
        ),
        (
            {
                "mode": "disagg",
                "values": {"speculative_config": {"decoding_type": "Draft_Target", "speculative_model": "m"}},
            },
            "prefill: --share-weights 2: the weights of the draft model of Draft_Target can't be shared; use NGram",
        ),
    ],
)
def test_what_can_not_be_shared_is_refused(spec: dict[str, Any], because: str) -> None:
    with pytest.raises(UsageError, match=because):
        plan_of(machine(8), share_weights=2, **spec)


def test_too_few_gpus_count_each_group_once() -> None:
    with pytest.raises(UsageError, match="need 3 GPUs, but 2 are visible"):
        plan_of(machine(2), workers=5, share_weights=2)
