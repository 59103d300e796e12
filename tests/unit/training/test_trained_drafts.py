"""The draft models of ``synthetic:tiny-trained`` guess right, and their script writes the same bytes again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import train_drafts

from trtx.checkpoint import read_end_ids, resolve_checkpoint
from trtx.checkpoint.held_out import held_out_samples
from trtx.text import load_tokenizer
from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.core.scheduler_limits import SchedulerLimits
from trtx.torch_engine.core.speculation.create import create_speculation
from trtx.torch_engine.llm_args import SpeculativeConfig
from trtx.torch_engine.messages import Submit
from trtx.torch_engine.runner import DraftArgs, RunnerArgs, create_runner
from trtx.torch_engine.sampling_plan import SamplingPlan

pytestmark = pytest.mark.slow
MODEL, PROMPTS = "synthetic:tiny-trained", 4


def tokens_a_step(kind: str, draft: str, task: str = "json") -> float:
    """Of decode steps that answer held-out prompts greedily, with four guesses each."""
    path = resolve_checkpoint(MODEL).path
    runner = create_runner(
        RunnerArgs(
            model_dir=path, device="cpu", dtype="float32", max_tokens=1024, max_batch_size=1, max_draft_len=4,
            draft=DraftArgs(kind, draft),
        )
    )  # fmt: skip
    config = SpeculativeConfig(decoding_type=kind, max_draft_len=4, draft_len_schedule={1: 4})
    core = EngineCore(
        runner, SchedulerLimits(1, 512), speculation=create_speculation(config, runner, max_num_tokens=512)
    )
    tokenizer, ends = load_tokenizer(path), read_end_ids(path)
    tokens = steps = 0
    for number, sample in enumerate(held_out_samples(task, PROMPTS)):
        plan = SamplingPlan(max_tokens=40, end_ids=ends)
        core.submit(Submit(number, tokenizer.encode(sample.chat()[0]).ids, plan))
        has_begun = False
        while core.wait_s is not None:
            report = core.step()
            for update in report.updates if report is not None else ():
                tokens += len(update.token_ids) if has_begun else 0
                steps += has_begun
                has_begun = True
    runner.close()
    return tokens / steps


@pytest.mark.parametrize(("kind", "draft"), [("Draft_Target", "tiny-draft"), ("Eagle3", "tiny-eagle3")])
def test_held_out_json_takes_fewer_than_half_of_the_steps(kind: str, draft: str) -> None:
    assert tokens_a_step(kind, f"synthetic:{draft}") >= 2.5


def test_an_eagle_head_that_reads_the_embeddings_copies() -> None:
    assert tokens_a_step("Eagle3", "synthetic:tiny-eagle3", "copying") >= 1.5


def trained(directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    monkeypatch.setattr("sys.argv", [
        "train_drafts.py", "--draft-steps", "2", "--eagle3-steps", "2", "--texts", "4",
        "--draft-out", str(directory / "draft"), "--eagle3-out", str(directory / "eagle3"),
    ])  # fmt: skip
    threads = torch.get_num_threads()
    train_drafts.main()
    torch.set_num_threads(threads)
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*.*"))}


def test_a_seed_gives_the_same_draft_models_which_the_engine_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (trained(tmp_path / name, monkeypatch) for name in ("first", "second"))
    assert first == second
    loaded: list[Any] = [
        tokens_a_step("Draft_Target", str(tmp_path / "first" / "draft")),
        tokens_a_step("Eagle3", str(tmp_path / "first" / "eagle3")),
    ]
    assert all(rate >= 1.0 for rate in loaded)
