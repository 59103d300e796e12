"""Conversations that return to one engine with a draft model, one request after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_reference import RecordingModel, Reference
from runner_player import random_prompt

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
        self._num_asked = 0
        self.begin()

    def begin(self) -> None:
        """Starts the same conversations anew."""
        self.histories = [random_prompt(30 + talk, talk) for talk in range(TALKS)]

    def ask(self, talk: int, answer: int = ANSWER) -> None:
        prompt = self.histories[talk]
        self.core.submit(Submit(self._num_asked, list(prompt), SamplingPlan(max_tokens=answer)))
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
            self._ask_each(turn)
            if not turn:
                self.model.num_computed = 0
        return self.model.num_computed

    def _ask_each(self, turn: int, reference: Reference | None = None, answer: int = ANSWER) -> None:
        for talk in range(TALKS):
            if turn:
                self.histories[talk] += random_prompt(3, 100 * turn + talk)
            self.model.drafts.clear()
            self.ask(talk, answer)
            made = [(length, tokens) for length, tokens in self.model.drafts if tokens]
            assert bool(made) == (answer > 1)
            for length, tokens in made if reference is not None else ():
                assert tokens == reference.draft(self.histories[talk][:length], len(tokens))

    def compare(self, reference: Reference, *, first_answers: int = ANSWER) -> None:
        """Fails if a head drafts anything but what ``reference`` drafts.

        ``first_answers``: tokens of the first answers; after one of 1 token its blocks have no draft KV.
        """
        for turn in range(TURNS):
            self._ask_each(turn, reference, ANSWER if turn else first_answers)


def new_runner(target: Path, draft: DraftArgs, **changes: Any) -> TorchRunner:
    return create_runner(
        RunnerArgs(
            model_dir=target, device="cpu", tokens_per_block=SIZE, num_blocks=LARGE, max_batch_size=1,
            max_draft_len=MOST, draft=draft, **changes,
        )
    )  # fmt: skip
