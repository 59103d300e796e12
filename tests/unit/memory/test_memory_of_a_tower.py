"""The vision tower is counted beside the decoder: what its file holds, in the dtype that is computed in."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from trtx.checkpoint import resolve_checkpoint
from trtx.checkpoint.model_config import read_model_config
from trtx.checkpoint.shapes import SHAPES
from trtx.checkpoint.towers import tower_tensors
from trtx.checkpoint.vision import decoder_name
from trtx.checkpoint.weight_index import read_header
from trtx.cli.memory_text import describe_memory
from trtx.config import TopologySpec
from trtx.ipc.encoder_messages import ARENA_BYTES, DEFAULT_MAX_NUM_TOKENS
from trtx.launch.ports import HOLDER
from trtx.launch.preparation import prepare
from trtx.memory import ENCODER_TOKENS, MediaMemory, MemoryDevice, MemoryPlan, encoder_share, plan_memory
from trtx.memory.encoder import ARENA_BYTES as share_of_arena
from trtx.memory.shapes import model_shape
from trtx.memory.torch_engine import stored_names
from trtx.torch_engine.runner.args import RunnerArgs
from trtx.torch_engine.runner.create import create_runner

HOST = MemoryDevice("CPU", 64 << 30, 64 << 30, is_gpu=False)


def test_a_llava_is_planned_with_its_tower_and_its_decoder_runs() -> None:
    path = resolve_checkpoint("synthetic:tiny-vl").path
    header = read_header(path / "model.safetensors")
    config = read_model_config(path)
    own = stored_names(path, config.architecture)
    assert own is not None and "model.embed_tokens.weight" in own and not any("vision" in name for name in own)
    tower, decoder = 0, 0
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if decoder_name(config.architecture, name) is None:
            tower += end - begin
        else:
            decoder += end - begin
    plan = plan_memory(path, "agg", {"max_batch_size": 2}, engine="torch", device=HOST)
    kv_scales = 2 * 4 * config.num_layers
    assert plan.weight_bytes == decoder + tower + kv_scales
    runner = create_runner(RunnerArgs(model_dir=path, max_batch_size=2, device="cpu"))
    try:
        assert plan.pool_bytes == runner.pool.untyped_storage().nbytes()
    finally:
        runner.close()


def test_a_worker_is_planned_with_the_encoder_that_it_starts() -> None:
    """By hand: of Qwen2.5-VL 7B's shape in bfloat16 on an H200, its tower beside the decoder or on another GPU."""
    path = resolve_checkpoint("synthetic:qwen2.5-vl-7b").path
    device = MemoryDevice("H200", 140 << 30, 138 << 30)

    def planned(media: MediaMemory | None) -> MemoryPlan:
        return plan_memory(path, "agg", {"max_batch_size": 8}, engine="torch", device=device, media=media)

    assert ENCODER_TOKENS == DEFAULT_MAX_NUM_TOKENS == 16384
    assert share_of_arena == ARENA_BYTES == 512 << 20
    share = encoder_share(path, {}, device, max_num_tokens=16384)
    tower = sum(map(math.prod, tower_tensors(SHAPES["qwen2.5-vl-7b"].config).values())) * 2
    assert (share.weight_bytes, share.context_bytes) == (tower, 590 << 20)
    of_patch = 3 * 2 * 14 * 14 + 2 * 1280 + 3 * 3420
    assert share.batch_bytes == (4 * 16384 * of_patch + 16384 * 3584) * 2
    alone, own, elsewhere = planned(None), planned(MediaMemory(True, 5 << 20)), planned(MediaMemory(False, 5 << 20))
    assert own.weight_bytes == alone.weight_bytes == elsewhere.weight_bytes + tower
    assert (own.encoder_bytes, elsewhere.encoder_bytes) == ((590 + 512) << 20, 0)
    assert (own.beside_bytes, elsewhere.beside_bytes) == (share.batch_bytes + (5 << 20), 5 << 20)
    assert elsewhere.pool_bytes - own.pool_bytes == pytest.approx(0.9 * (tower + own.encoder_bytes), rel=1e-3)
    assert own.notes == alone.notes == ()


def test_a_pool_that_leaves_too_little_for_images_is_told() -> None:
    path = resolve_checkpoint("synthetic:qwen2.5-vl-7b").path
    values = {"max_batch_size": 8, "kv_cache_config": {"free_gpu_memory_fraction": 0.99}}
    device = MemoryDevice("H200", 140 << 30, 138 << 30)
    plan = plan_memory(path, "agg", values, engine="torch", device=device, media=MediaMemory(True, 512 << 20))
    (note,) = plan.notes
    assert "images may take" in note and "lower kv_cache_config.free_gpu_memory_fraction" in note
    assert max(map(len, describe_memory([plan]))) <= 80


def test_a_topology_says_what_its_encode_workers_take(tmp_path: Path) -> None:
    made = {}
    for encode in (0, 1):
        spec = TopologySpec(model="synthetic:tiny-vl", engine="torch", port=0, mode="disagg", encode=encode)
        made[encode] = prepare(spec, run_dir=tmp_path)
        HOLDER.release((made[encode].port, *made[encode].internal_ports))
    told = [reason for reason in made[1].reasons if reason.startswith("encode: ") and "of weights" in reason]
    assert len(told) == 1 and "while a batch of 16384 rows is encoded" in told[0]
    with_tower, without = ({plan.role: plan.weight_bytes for plan in made[encode].memory} for encode in (0, 1))
    assert with_tower["prefill"] > without["prefill"] == without["decode"] == with_tower["decode"]


@pytest.mark.parametrize("name", ["tiny-qwen2.5-vl", "tiny-qwen3-vl", "qwen2.5-vl-7b"])
def test_the_estimate_of_a_tower_is_near_its_tensors(name: str) -> None:
    config = SHAPES[name].config
    exact = sum(map(math.prod, tower_tensors(config).values()))
    assert model_shape(config).vision == pytest.approx(exact, rel=0.06)
