"""Logits processors on a GPU: an engine's tokens against a CPU's, with and without CUDA graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_player import Engine, Wish, assert_equal
from processed_player import processed_workload, served_processed
from runner_player import random_prompt

from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.core.logits_processors import LoadedProcessors
from trtx.torch_engine.core.scheduler_limits import SchedulerLimits
from trtx.torch_engine.messages import Submit
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner
from trtx.torch_engine.sampling_plan import SamplingPlan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def new_runner(checkpoint: Path, device: str, **changes: Any) -> TorchRunner:
    values: dict[str, Any] = {
        "device": device, "dtype": "float32", "tokens_per_block": 8, "num_blocks": 64, "max_batch_size": 5,
    } | changes  # fmt: skip
    return create_runner(RunnerArgs(model_dir=checkpoint, **values))


@pytest.mark.parametrize("graphs", [True, False])
def test_an_engine_gives_the_processed_tokens_of_a_cpu(checkpoint: Path, graphs: bool) -> None:
    cpu, cuda = new_runner(checkpoint, "cpu"), new_runner(checkpoint, "cuda", cuda_graphs=graphs)
    for seed in range(4):
        wishes, hooks = processed_workload(seed)
        expected, _ = served_processed(cpu, wishes, hooks, overlap=False)
        for overlap in (True, False):
            assert_equal(served_processed(cuda, wishes, hooks, overlap=overlap)[0], expected, wishes)
    cuda.close()


def test_preempted_processed_sequences_have_the_same_tokens(checkpoint: Path) -> None:
    small, large = (new_runner(checkpoint, "cuda", num_blocks=blocks) for blocks in (11, 64))
    for seed in range(4):
        wishes, hooks = processed_workload(seed)
        found, expected = (served_processed(one, wishes, hooks, overlap=True)[0] for one in (small, large))
        assert_equal(found, expected, wishes)
    for runner in (small, large):
        runner.close()


def test_other_requests_are_bit_for_bit_the_same_beside_processed_ones(checkpoint: Path) -> None:
    one = new_runner(checkpoint, "cuda", deterministic=True)
    wishes, hooks = processed_workload(4)
    for wish in wishes:
        wish.params["logprobs"] = 2
    beside, _ = served_processed(one, wishes, hooks, overlap=True)
    for at, wish in enumerate(wishes):
        if at not in hooks:
            alone, _ = served_processed(one, [Wish(0, wish.prompt, wish.params, None)], {}, overlap=False)
            assert (alone[0].tokens, alone[0].logprobs) == (beside[at].tokens, beside[at].logprobs)
    one.close()


@pytest.mark.parametrize("graphs", [True, False])
def test_a_batched_processor_works_on_the_stream_that_it_is_given(checkpoint: Path, graphs: bool) -> None:
    """As in TensorRT-LLM's example: masks come from the host by copies on that stream."""
    calls: list[int] = []

    def only(req_ids: list[int], logits: list[torch.Tensor], _: Any, stream_ptr: Any, __: Any) -> None:
        calls.append(len(req_ids))
        assert stream_ptr == torch.cuda.current_stream().cuda_stream
        assert stream_ptr, "torch.cuda.ExternalStream(0) is a stream that nothing waits for"
        masks = [torch.full(row.shape, -torch.inf).pin_memory() for row in logits]
        with torch.cuda.stream(torch.cuda.ExternalStream(stream_ptr)):
            for request, row, mask in zip(req_ids, logits, masks, strict=True):
                mask[:, :, 10 + request] = 0
                row += mask.to(row.device, non_blocking=True)

    runner = new_runner(checkpoint, "cuda", cuda_graphs=graphs)
    core = EngineCore(runner, SchedulerLimits(5, 24), batched_processor=only)
    tokens: dict[int, list[int]] = {at: [] for at in range(3)}
    for at in tokens:
        core.submit(Submit(at, random_prompt(9, at), SamplingPlan(max_tokens=6, applies_batched=True)))
    while core.wait_s == 0.0 or core.scheduler.running or core.scheduler.waiting:
        report = core.step()
        for update in report.updates if report is not None else ():
            tokens[update.sequence_id] += update.token_ids
    assert tokens == {at: [10 + at] * 6 for at in range(3)}
    assert 3 in calls
    runner.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_that_are_no_numbers_end_their_own_request(checkpoint: Path, dtype: str) -> None:
    def spoils(_: int, logits: torch.Tensor, *__: object) -> None:
        logits[..., 3] = torch.nan

    runner = new_runner(checkpoint, "cuda", dtype=dtype)
    engine = Engine(runner, overlap=True)
    for at, hooks in enumerate(((spoils,), ())):
        engine.core.submit(Submit(at, random_prompt(5, at), SamplingPlan(max_tokens=5)), LoadedProcessors(hooks))
    updates = []
    while engine.core.wait_s == 0.0 or engine.core.scheduler.running or engine.core.scheduler.waiting:
        report = engine.core.step()
        updates += report.updates if report is not None else []
    (failed,) = [update for update in updates if update.error is not None]
    assert failed.sequence_id == 0 and not failed.is_failure and "logits processors" in str(failed.error)
    assert sum(len(update.token_ids) for update in updates if update.sequence_id == 1) == 5
    runner.close()
