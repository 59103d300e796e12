"""Pictures, and three positions a token, on a GPU: what it answers is what a CPU does, with and without graphs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_player import Answer, Engine
from mrope_player import FAMILIES, PROMPTS, Seen, build_vl
from PIL import Image

from trtx.checkpoint import resolve_checkpoint
from trtx.config.media import MediaLimits
from trtx.ipc.shared_tensor import share
from trtx.media.blob import Blob
from trtx.media.pool import PicturePool
from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.core.scheduler_limits import SchedulerLimits
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.messages import Submit
from trtx.torch_engine.runner import RunnerArgs, create_runner
from trtx.torch_engine.step import StepEmbedding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def answers(directory: Path, prompts: list[Seen], device: str, **more: Any) -> list[Answer]:
    runner = create_runner(
        RunnerArgs(
            model_dir=directory, device=device, dtype="float32", tokens_per_block=8, num_blocks=40,
            max_batch_size=6, **more,
        )
    )  # fmt: skip
    engine = Engine(runner, overlap=True)
    engine.core = EngineCore(runner, SchedulerLimits(6, 11))
    plan = resolve_sampling(
        SamplingParams(max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=0, temperature=0.0)
    )
    for at, one in enumerate(prompts):
        for key, rows in one.features().items():
            loaded = runner.load_embedding(share(rows, directory))
            assert isinstance(loaded, StepEmbedding) and loaded.tensor.device.type == device
            engine.core.scheduler.media.put(key, loaded)
        engine.core.submit(Submit(at, one.ids, plan, media=one.spans))
    engine.finish()
    runner.close()
    return [engine.answers[at] for at in range(len(prompts))]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("graphs", [True, False])
def test_logits_of_pictures_are_the_cpus(family: str, graphs: bool, tmp_path: Path) -> None:
    model = build_vl(family)
    model.save_pretrained(tmp_path)
    prompts = [Seen(model, parts) for parts in PROMPTS.values()]
    expected = answers(tmp_path, prompts, "cpu")
    for ours, theirs in zip(answers(tmp_path, prompts, "cuda", cuda_graphs=graphs), expected, strict=True):
        assert ours.tokens == theirs.tokens
        pairs = zip(ours.prompt_logprobs + ours.logprobs, theirs.prompt_logprobs + theirs.logprobs, strict=True)
        for one, other in pairs:
            for token, value in one.items():
                assert value.logprob == pytest.approx(other[token].logprob, abs=2e-3)


async def test_decoders_start_with_the_transformers_that_a_gpus_machine_has(tmp_path: Path) -> None:
    """Its release need not be the one that other tests run with."""
    checkpoint = resolve_checkpoint("synthetic:tiny-qwen2.5-vl", on_gpu=False).path
    file = io.BytesIO()
    Image.new("RGB", (64, 48), (250, 0, 0)).save(file, "PNG")
    async with PicturePool(checkpoint, MediaLimits(), directory=tmp_path) as pool:
        prepared = await pool.prepare(Blob(file.getvalue(), "a red picture"))
    assert prepared.grid is not None
