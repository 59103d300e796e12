"""TensorRT-LLM's Draft_Target: a small model of the same tokenizer drafts, on a runner of its own."""

from __future__ import annotations

from collections.abc import Sequence

from trtx.torch_engine.drafting import DraftShare
from trtx.torch_engine.sampling_plan import SamplingPlan
from trtx.torch_engine.step import FROM_SLOT, Batch, LaunchedStep, ModelRunner, ScheduledSequence

_GREEDY = SamplingPlan()


class SmallModel:
    """A :class:`DraftModel` that is a whole decoder. Each pass after the first takes its tokens from the pass before,
    on the device.
    """

    token_shift = 0

    def __init__(self, runner: ModelRunner) -> None:
        """``runner`` has as many slots and blocks as the target model's runner, with blocks of the same number of
        tokens.
        """
        self._runner = runner
        self.pools = (runner.pool,)
        size = runner.geometry.tokens_per_block
        self.room = runner.max_position // size * size

    def draft(self, shares: Sequence[DraftShare]) -> list[list[int]]:
        batch = [
            (at, _scheduled(share, share.tokens, share.start, samples=share.count > 0, is_first=share.is_first))
            for at, share in enumerate(shares)
        ]
        # The runner expects decodes first.
        batch.sort(key=lambda one: not (one[1].samples and one[1].start > 0 and len(one[1].new_token_ids) == 1))
        order = [at for at, _ in batch]
        launched: list[tuple[list[int], LaunchedStep]] = [
            (order, self._runner.launch(Batch([one for _, one in batch])))
        ]
        for place in range(1, max((share.count for share in shares), default=0)):
            longer = [at for at, share in enumerate(shares) if share.count > place]
            passes = [
                _scheduled(share, [FROM_SLOT], share.start + len(share.tokens) + place - 1, samples=True)
                for share in (shares[at] for at in longer)
            ]
            launched.append((longer, self._runner.launch(Batch(passes))))
        drafts: list[list[int]] = [[] for _ in shares]
        for place, (places, step) in enumerate(launched):
            for at, sampled in zip(places, step.results(), strict=True):
                # A draft ends where the logits are not numbers.
                if sampled.token_id is not None and len(drafts[at]) == place:
                    drafts[at].append(sampled.token_id)
        return drafts


def _scheduled(
    share: DraftShare, tokens: list[int], start: int, *, samples: bool, is_first: bool = False
) -> ScheduledSequence:
    return ScheduledSequence(
        slot=share.slot, is_first=is_first, new_token_ids=tokens, start=start, block_ids=share.block_ids[:1],
        samples=samples, sampling=_GREEDY, prompt_token_ids=[], output_token_ids=[], seed=0,
    )  # fmt: skip
