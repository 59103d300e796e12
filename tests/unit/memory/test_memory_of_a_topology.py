"""Each role of a topology is planned on the GPUs that its workers were given, as full as they are."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from trtx.checkpoint import resolve_checkpoint
from trtx.cli.memory_text import describe_memory
from trtx.config import ResolvedEngineConfig, TopologySpec
from trtx.errors import UsageError
from trtx.launch.memory import with_memory
from trtx.memory import ENCODER_TOKENS, MemoryDevice, encoder_share
from trtx.topology import BrokerPorts, Gpu, Machine, Plan, Ports, plan

GIB = 1 << 30
H100_BYTES = 81559 << 20


def _machine(*free_gib: int) -> Machine:
    gpus = (
        Gpu(index, f"GPU-{index:04x}", "NVIDIA H100 80GB HBM3", H100_BYTES, memory_free_bytes=free * GIB)
        for index, free in enumerate(free_gib)
    )
    return Machine(tuple(gpus), cpu_cores=16)


def _planned(
    machine: Machine, *, engine: str = "torch", model: str = "synthetic:qwen3-8b", kv: Any = None, **asked: Any
) -> Plan:
    spec = TopologySpec(**asked)
    count = sum(spec.roles.values())
    made = plan(
        spec,
        machine,
        checkpoint=resolve_checkpoint(model),
        engine=engine,
        engine_configs={
            role: ResolvedEngineConfig(
                role, {"max_batch_size": 64} | ({"kv_cache_config": kv} if kv else {}), "test", ()
            )
            for role in spec.roles
        },
        ports=Ports((8000,), (BrokerPorts(9000, 9001),), tuple(range(9002, 9002 + count))),
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


SEES = "synthetic:qwen2.5-vl-7b"


def test_a_worker_leaves_room_for_the_encode_workers_that_share_its_gpu() -> None:
    """By hand: the pool is 0.9 of what an encode worker's weights, context and largest batch leave too, in blocks and
    three digits, and the engine is told so, as it may start before the encoder has taken anything."""
    machine = _machine(79, 79)
    alone = _planned(machine, mode="disagg", model=SEES, encode=0)
    shared = _planned(machine, mode="disagg", model=SEES, encode_shared=1)
    share = encoder_share(
        shared.model_path,
        {},
        MemoryDevice("NVIDIA H100 80GB HBM3", H100_BYTES, 79 * GIB),
        max_num_tokens=ENCODER_TOKENS,
    )
    before, (prefill, decode) = alone.memory[0], shared.memory
    assert (prefill.role, prefill.shared_bytes, decode.shared_bytes) == ("prefill", share.total_bytes, 0)
    own = before.encoder_bytes + share.weight_bytes  # alone it has an encoder of its own
    room = before.pool_bytes + int(0.9 * own) - int(0.9 * share.total_bytes)
    blocks = room // int(prefill.kv_bytes_per_token * prefill.tokens_per_block)
    told = shared.engine_configs["prefill"]["kv_cache_config"]["max_tokens"]
    assert 0.99 * blocks * prefill.tokens_per_block <= told <= blocks * prefill.tokens_per_block
    assert prefill.max_tokens == told and prefill.capacity_tokens <= told
    assert "kv_cache_config" not in shared.engine_configs["decode"]
    assert any(
        reason.startswith(f"prefill: kv_cache_config.max_tokens = {told} because encode workers that share its GPU")
        for reason in shared.reasons
    )
    (row,) = [line for line in describe_memory(shared.memory) if "that share the GPU" in line]
    assert len(row) <= 80
    assert Plan.from_json(json.loads(json.dumps(shared.to_json()))).memory == shared.memory


def test_the_same_machine_with_a_few_mib_less_gives_the_same_config() -> None:
    """Or a run could not be resumed."""
    asked: dict[str, Any] = {"mode": "agg", "model": SEES, "encode_shared": 1}
    first = _planned(_machine(79), **asked).engine_configs
    gpu = _machine(79).gpus[0]
    less = Machine((dataclasses.replace(gpu, memory_free_bytes=79 * GIB - (8 << 20)),), cpu_cores=16)
    assert _planned(less, **asked).engine_configs == first


def test_two_that_share_take_twice_as_much_and_a_smaller_pool_stays_what_was_asked() -> None:
    one, two = (
        _planned(_machine(79), mode="agg", model=SEES, encode_shared=count).memory[0].shared_bytes for count in (1, 2)
    )
    assert two == 2 * one > 0
    asked = _planned(_machine(79), mode="agg", model=SEES, encode_shared=1, kv={"max_tokens": 4096})
    assert asked.engine_configs["agg"]["kv_cache_config"] == {"max_tokens": 4096}


def test_what_does_not_fit_beside_an_encode_worker_is_refused_with_what_that_takes() -> None:
    fits = _planned(_machine(25), mode="agg", model=SEES, encode=0)
    assert fits.memory[0].pool_bytes > 0
    with pytest.raises(UsageError, match=r"agg: .*doesn't fit.*encode workers that share it \d+\.\d\d GiB"):
        _planned(_machine(25), mode="agg", model=SEES, encode_shared=4)


def test_an_encode_worker_on_a_gpu_of_its_own_takes_nothing_of_anothers() -> None:
    made = _planned(_machine(79, 79), mode="agg", model=SEES, encode=1)
    assert made.memory[0].shared_bytes == 0 and "kv_cache_config" not in made.engine_configs["agg"]
    with pytest.raises(UsageError, match=r"an encode worker takes .* has 1\.00 GiB free"):
        _planned(_machine(1, 79), mode="agg", model=SEES, encode=1)


def _for_tensorrt_llm(machine: Machine, **asked: Any) -> Plan:
    made = _planned(machine, model=SEES, **asked)  # it needs no package of that name
    config = {"max_batch_size": 64} | ({"kv_cache_config": asked["kv"]} if "kv" in asked else {})
    configs = {role: dict(config) for role in made.engine_configs}
    return dataclasses.replace(made, engine="tensorrt-llm", reasons=(), memory=(), engine_configs=configs)


def test_an_llm_of_tensorrt_llm_leaves_room_for_the_encode_workers_on_its_gpu() -> None:
    machine = _machine(79, 79)
    alone = with_memory(_for_tensorrt_llm(machine, mode="agg", encode=0), machine).memory[0]
    made = with_memory(_for_tensorrt_llm(machine, mode="agg", encode_shared=2), machine)
    share = encoder_share(
        made.model_path, {}, MemoryDevice("NVIDIA H100 80GB HBM3", H100_BYTES, 79 * GIB), max_num_tokens=ENCODER_TOKENS
    )
    (agg,) = made.memory
    assert agg.shared_bytes == 2 * share.total_bytes > 2 * share.weight_bytes > 0
    told = made.engine_configs["agg"]["kv_cache_config"]["max_tokens"]
    room = alone.pool_bytes - int(0.9 * agg.shared_bytes)
    assert 0.99 * room <= told * agg.kv_bytes_per_token <= room
    assert any(reason.startswith(f"agg: kv_cache_config.max_tokens = {told}") for reason in made.reasons)
    assert any("is an estimate made with the torch engine's formulas" in reason for reason in made.reasons)
    own = with_memory(_for_tensorrt_llm(machine, mode="agg", encode=1), machine)
    assert (own.memory[0].shared_bytes, "kv_cache_config" in own.engine_configs["agg"]) == (0, False)
    assert [reason for reason in own.reasons if "encode" in reason] == [
        "no memory plan for encode workers because the memory use of their engine is not known"
    ]


def test_beside_an_encoder_that_nobody_counts_a_pool_has_to_be_bounded(tmp_path: Path) -> None:
    """Of a model that TensorRT-LLM alone serves: of its tower nothing is known here."""
    machine = _machine(79)
    config = json.loads((resolve_checkpoint(SEES).path / "config.json").read_text())
    config["architectures"] = ["SomeOtherVLForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(config))

    def planned(**asked: Any) -> Plan:
        made = _for_tensorrt_llm(machine, mode="agg", encode_shared=1, **asked)
        return with_memory(dataclasses.replace(made, model_path=tmp_path), machine)

    with pytest.raises(UsageError) as refused:
        planned()
    assert "agg shares its GPU with encode workers and their memory use is unknown" in str(refused.value)
    assert "--set agg.kv_cache_config.max_tokens=N" in str(refused.value)
    bounded = planned(kv={"max_tokens": 4096})
    assert bounded.engine_configs["agg"]["kv_cache_config"] == {"max_tokens": 4096}
    assert any(reason.startswith("no memory plan because its vision tower") for reason in bounded.reasons)


def test_two_workers_of_a_gpu_count_their_weights_once_and_divide_the_rest() -> None:
    """By hand: half of what one copy of the weights leaves, without the reserves of one worker, 0.9 of it for KV."""
    machine = _machine(79)
    (alone,) = _planned(machine).memory
    (shared,) = _planned(machine, workers=2, share_weights=2).memory
    assert (alone.engines, shared.engines) == (1, 2)
    assert shared.weight_bytes == alone.weight_bytes > 15 * GIB
    own = alone.context_bytes + alone.activation_bytes + alone.graph_bytes + alone.transfer_bytes
    left = round(alone.pool_bytes / alone.fraction) + own  # of the GPU, beside the weights
    assert shared.pool_bytes == pytest.approx(0.9 * (left // 2 - own), abs=4096)
    assert 2 * shared.pool_bytes + shared.weight_bytes < H100_BYTES
    text = "\n".join(describe_memory((shared,)))
    assert f"  workers{'2':>21}  share the weights and divide the rest; of each:" in text
    assert max(map(len, text.splitlines())) <= 80


def test_shared_weights_that_leave_too_little_for_each_worker_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        UsageError, match=r"weights 15.*GiB that 4 workers share.*4 workers divide what the weights leave"
    ):
        _planned(_machine(24), workers=4, share_weights=4)


def test_on_a_cpu_shared_weights_are_counted_once_for_all_workers() -> None:
    (alone,), (shared,) = (
        _planned(Machine((), cpu_cores=4), model="synthetic:tiny", workers=2, **more).memory
        for more in ({}, {"share_weights": 2})
    )
    assert (shared.engines, shared.weight_bytes, shared.pool_bytes) == (2, alone.weight_bytes, alone.pool_bytes)
