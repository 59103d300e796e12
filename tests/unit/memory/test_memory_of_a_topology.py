"""Each role of a topology is planned on the GPUs that its workers were given, as full as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trtx.checkpoint import resolve_checkpoint
from trtx.config import ResolvedEngineConfig, TopologySpec
from trtx.errors import UsageError
from trtx.launch.memory import with_memory
from trtx.topology import Broker, Gpu, Machine, Plan, Ports, plan

GIB = 1 << 30
H100_BYTES = 81559 << 20


def _machine(*free_gib: int) -> Machine:
    gpus = (
        Gpu(index, f"GPU-{index:04x}", "NVIDIA H100 80GB HBM3", H100_BYTES, memory_free_bytes=free * GIB)
        for index, free in enumerate(free_gib)
    )
    return Machine(tuple(gpus), cpu_cores=16)


def _planned(machine: Machine, *, engine: str = "torch", **asked: Any) -> Plan:
    spec = TopologySpec(**asked)
    count = sum(spec.roles.values())
    made = plan(
        spec,
        machine,
        checkpoint=resolve_checkpoint("synthetic:qwen3-8b"),
        engine=engine,
        engine_configs={role: ResolvedEngineConfig(role, {"max_batch_size": 64}, "test", ()) for role in spec.roles},
        ports=Ports((8000,), (Broker(9000, 9001),), tuple(range(9002, 9002 + count))),
        namespace="trtx-test",
        run_dir=Path("/runs/one"),
        scratch_dir=Path("/scratch"),
    )
    return with_memory(made, machine)


def test_the_fullest_gpu_of_a_role_decides() -> None:
    (memory,) = _planned(_machine(79, 50), workers=2).memory
    assert memory.others_bytes == pytest.approx(29 * GIB, abs=GIB)
    prefill, decode = _planned(_machine(79, 50), mode="disagg").memory
    assert (prefill.role, decode.role) == ("prefill", "decode")
    assert prefill.others_bytes < GIB < decode.others_bytes
    assert prefill.capacity_blocks > decode.capacity_blocks


def test_a_gpu_that_others_fill_is_refused_with_what_they_hold() -> None:
    with pytest.raises(UsageError, match=r"decode: .*doesn't fit.*other processes 6\d\.\d\d GiB"):
        _planned(_machine(79, 12), mode="disagg")


def test_engines_that_compute_nothing_have_no_plan() -> None:
    assert _planned(Machine((), cpu_cores=4), engine="paced").memory == ()


def test_plan_json_keeps_it() -> None:
    made = _planned(_machine(79))
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))).memory == made.memory
