"""The vision tower is counted beside the decoder: what its file holds, in the dtype that is computed in."""

from __future__ import annotations

import math

import pytest

from trtx.checkpoint import resolve_checkpoint
from trtx.checkpoint.model_config import read_model_config
from trtx.checkpoint.shapes import SHAPES
from trtx.checkpoint.towers import tower_tensors
from trtx.checkpoint.vision import decoder_name
from trtx.checkpoint.weight_index import read_header
from trtx.memory import Device, plan_memory
from trtx.memory.shapes import model_shape
from trtx.memory.torch_engine import stored_names
from trtx.torch_engine.runner.args import RunnerArgs
from trtx.torch_engine.runner.create import create_runner

HOST = Device("CPU", 64 << 30, 64 << 30, is_gpu=False)


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


@pytest.mark.parametrize("name", ["tiny-qwen2.5-vl", "tiny-qwen3-vl", "qwen2.5-vl-7b"])
def test_the_estimate_of_a_tower_is_near_its_tensors(name: str) -> None:
    config = SHAPES[name].config
    exact = sum(map(math.prod, tower_tensors(config).values()))
    assert model_shape(config).vision == pytest.approx(exact, rel=0.06)
