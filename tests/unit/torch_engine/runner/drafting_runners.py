"""Runners of one small target model with draft models, and speculation that verifies all that they draft."""

from __future__ import annotations

from pathlib import Path

from eagle_reference import CAPTURED, build_target, head_tensors, save_head
from engine_player import Answer, Wish
from knowing_drafter import KnowingModel
from noisy_drafts import save_noisy, with_tokenizer
from runner_player import save

from trtx.torch_engine.core.speculation.create import create_speculation
from trtx.torch_engine.core.speculation.speculation import Speculation
from trtx.torch_engine.drafting import DraftModel
from trtx.torch_engine.llm_args import SpeculativeConfig
from trtx.torch_engine.ranks.children import start_ranks
from trtx.torch_engine.ranks.leader import LeadingRunner, create_ranked_runner
from trtx.torch_engine.runner import DraftArgs, RunnerArgs, TorchRunner, create_runner

KINDS = ("Draft_Target", "Eagle3")
MOST, STEP_TOKENS = 3, 24
RIGHT = 0.6  # share of the tokens of an EAGLE-3 head that are replaced by right ones: its own weights are random


class DraftingRunners:
    """Creates each runner when it is first used. All are ``--deterministic``, so their bits can be compared."""

    def __init__(self, directory: Path, *, ranks: int = 1) -> None:
        for name in ("target", *KINDS):
            (directory / name).mkdir()
        self._target = with_tokenizer(save(build_target(), directory / "target"))
        save_noisy(build_target(), directory / "Draft_Target")
        save_head(directory / "Eagle3", head_tensors())
        layers = {"Draft_Target": None, "Eagle3": CAPTURED}
        self._drafts = {kind: DraftArgs(kind, str(directory / kind), layers[kind]) for kind in KINDS}
        self._created: dict[tuple[str, int], tuple[TorchRunner | LeadingRunner, DraftModel | None]] = {}
        self._ranks = ranks

    def close(self) -> None:
        for runner, _ in self._created.values():
            runner.close()

    def get(self, kind: str, num_blocks: int = 11) -> TorchRunner | LeadingRunner:
        """``kind``: of the draft model, or "" for none. 11 blocks of 8 tokens hold one long sequence and little more,
        so sequences are preempted."""
        return self._get(kind, num_blocks)[0]

    def _get(self, kind: str, num_blocks: int) -> tuple[TorchRunner | LeadingRunner, DraftModel | None]:
        if (kind, num_blocks) not in self._created:
            args = RunnerArgs(
                model_dir=self._target, device="cpu", tokens_per_block=8, num_blocks=num_blocks, max_batch_size=5,
                guided=True, max_draft_len=MOST, deterministic=True, draft=self._drafts.get(kind),
            )  # fmt: skip
            runner: TorchRunner | LeadingRunner
            if self._ranks == 1:
                runner = create_runner(args)
            else:
                runner = create_ranked_runner(args, start_ranks(self._ranks, print))
            self._created[kind, num_blocks] = runner, runner.draft_model
        return self._created[kind, num_blocks]

    def always(
        self, kind: str, wishes: list[Wish], expected: dict[int, Answer], num_blocks: int = 11
    ) -> Speculation | None:
        """Returns speculation that verifies all that the model of ``kind`` drafts; None without a kind."""
        if not kind:
            return None
        runner, model = self._get(kind, num_blocks)
        assert model is not None
        known = [wish.prompt + expected[index].tokens for index, wish in enumerate(wishes) if index in expected]
        runner.draft_model = KnowingModel(model, known, right=RIGHT) if kind == "Eagle3" else model
        config = SpeculativeConfig(decoding_type=kind, max_draft_len=MOST, draft_len_schedule={5: MOST})
        return create_speculation(config, runner, max_num_tokens=STEP_TOKENS)
