"""A draft model beside a host tier: blocks that return bring its KV, and the features of an EAGLE-3 head, with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from eagle_reference import CAPTURED, RecordingModel, Reference, build_target, head_tensors, save_head
from noisy_drafts import with_tokenizer
from runner_player import random_prompt, save

from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.core.scheduler_limits import SchedulerLimits
from trtx.torch_engine.core.speculation.create import create_speculation
from trtx.torch_engine.drafting import DraftModel, DraftShare
from trtx.torch_engine.llm_args import SpeculativeConfig
from trtx.torch_engine.messages import Submit
from trtx.torch_engine.runner import DraftArgs, RunnerArgs, TorchRunner, create_runner
from trtx.torch_engine.runner.host_copies import create_host_copies, pools_of
from trtx.torch_engine.sampling_plan import SamplingPlan

SIZE, SMALL, LARGE, MOST = 8, 11, 64, 3  # tokens of a block, blocks of the pools, draft tokens
TALKS, TURNS, ANSWER = 3, 4, 6


class CountingModel(RecordingModel):
    """Also counts the tokens that the draft model computes."""

    def __init__(self, model: DraftModel) -> None:
        super().__init__(model)
        self.num_computed = 0

    def draft(self, shares: Sequence[DraftShare]) -> list[list[int]]:
        self.num_computed += sum(len(share.tokens) for share in shares)
        return super().draft(shares)


class Talks:
    """Conversations on one engine that return in turn, one request after the other."""

    def __init__(self, runner: TorchRunner, kind: str, *, num_blocks: int, host_blocks: int = 0) -> None:
        assert runner.draft_model is not None
        self.model = CountingModel(runner.draft_model)
        copies = None
        if host_blocks:
            block_bytes = sum(pool[0].nbytes for pool in pools_of(runner))
            copies = create_host_copies(pools_of(runner), host_blocks * block_bytes, 1)
        own, runner.draft_model = runner.draft_model, self.model
        config = SpeculativeConfig(decoding_type=kind, max_draft_len=MOST, draft_len_schedule={1: MOST})
        self.speculation = create_speculation(config, runner, max_num_tokens=128)
        whole, runner.num_blocks = runner.num_blocks, num_blocks
        self.core = EngineCore(runner, SchedulerLimits(1, 128), speculation=self.speculation, host_copies=copies)
        runner.num_blocks, runner.draft_model = whole, own
        self.histories = [random_prompt(30 + talk, talk) for talk in range(TALKS)]
        self._num_asked = 0

    def ask(self, talk: int) -> None:
        prompt = self.histories[talk]
        self.core.submit(Submit(self._num_asked, list(prompt), SamplingPlan(max_tokens=ANSWER)))
        self._num_asked += 1
        while self.core.wait_s is not None:
            report = self.core.step()
            self.core.check()
            for update in report.updates if report is not None else ():
                assert update.error is None, update.error
                prompt.extend(update.token_ids)

    def ask_all(self) -> int:
        """Returns the number of tokens that the draft model computed for conversations that returned."""
        for turn in range(TURNS):
            for talk in range(TALKS):
                if turn:
                    self.histories[talk] += random_prompt(3, 100 * turn + talk)
                self.ask(talk)
            if not turn:
                self.model.num_computed = 0
        return self.model.num_computed


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(save(build_target(), tmp_path_factory.mktemp("target")))


def new_runner(target: Path, draft: DraftArgs) -> TorchRunner:
    return create_runner(
        RunnerArgs(
            model_dir=target, device="cpu", tokens_per_block=SIZE, num_blocks=LARGE, max_batch_size=1,
            max_draft_len=MOST, draft=draft,
        )
    )  # fmt: skip


def test_a_head_drafts_for_returned_blocks_what_the_public_method_drafts(target: Path, tmp_path: Path) -> None:
    head = save_head(tmp_path / "head", head_tensors())
    runner = new_runner(target, DraftArgs("Eagle3", str(head), CAPTURED))
    talks = Talks(runner, "Eagle3", num_blocks=SMALL, host_blocks=LARGE)
    reference = Reference(build_target(), head_tensors(), CAPTURED)
    for turn in range(TURNS):
        for talk in range(TALKS):
            if turn:
                talks.histories[talk] += random_prompt(3, 100 * turn + talk)
            talks.model.drafts.clear()
            talks.ask(talk)
            made = [(length, tokens) for length, tokens in talks.model.drafts if tokens]
            assert made
            for length, tokens in made:
                assert tokens == reference.draft(talks.histories[talk][:length], len(tokens))
    assert talks.core.tier is not None and talks.core.tier.counters.loaded > TALKS * TURNS
