"""Measures speculation of returning conversations above a host tier: what is accepted, and what is computed again.

    python benchmarks/returning_drafts.py    # a CPU, about 1 min

Conversations on held-out texts of ``synthetic:tiny-trained`` take turns: each turn adds a sentence and answers it
greedily, one request at a time. Each draft model serves them with a pool that holds all of them, with a pool that holds
a few of them above host memory, and with that pool alone. ``tokens a step`` counts decode steps; ``drafting`` is the
number of tokens that the draft model computes for each prompt token of a conversation that returns. Every answer must
be the same. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from trtx.checkpoint import resolve_checkpoint
from trtx.checkpoint.held_out import held_out_passages
from trtx.text import load_tokenizer
from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.core.scheduler_limits import SchedulerLimits
from trtx.torch_engine.core.speculation.create import create_speculation
from trtx.torch_engine.drafting import DraftModel, DraftShare
from trtx.torch_engine.llm_args import SpeculativeConfig
from trtx.torch_engine.messages import Submit
from trtx.torch_engine.runner import DraftArgs, RunnerArgs, TorchRunner, create_runner
from trtx.torch_engine.runner.host_copies import create_host_copies, pools_of
from trtx.torch_engine.sampling_plan import SamplingPlan

MODEL, DRAFTS = "synthetic:tiny-trained", {"Draft_Target": "synthetic:tiny-draft", "Eagle3": "synthetic:tiny-eagle3"}
SIZE = 16  # tokens of a block


class CountingModel:
    """Counts the tokens that a draft model computes before its first draft of each share."""

    def __init__(self, model: DraftModel) -> None:
        self.token_shift, self.room, self.pools = model.token_shift, model.room, model.pools
        self.num_computed = 0
        self._model = model

    def draft(self, shares: Sequence[DraftShare]) -> list[list[int]]:
        self.num_computed += sum(len(share.tokens) for share in shares)
        return self._model.draft(shares)


@dataclass
class Row:
    drafter: str
    engine: str
    tokens_per_step: float
    accepted: float  # share of the drafted tokens
    drafting: float
    found: float  # share of the prompt tokens of conversations that return
    answers: list[list[int]] = field(repr=False)


def measure(
    runner: TorchRunner, kind: str, engine: str, blocks: int, *, has_tier: bool, turns: int, osl: int, most: int,
    begun: list[list[int]], added: list[list[int]],
) -> Row:  # fmt: skip
    assert runner.draft_model is not None
    own, runner.draft_model = runner.draft_model, CountingModel(runner.draft_model)
    counting = runner.draft_model
    copies = None
    if has_tier:
        pools = pools_of(runner)
        copies = create_host_copies(pools, runner.num_blocks * sum(pool[0].nbytes for pool in pools), 1)
    config = SpeculativeConfig(decoding_type=kind, max_draft_len=most, draft_len_schedule={1: most})
    speculation = create_speculation(config, runner, max_num_tokens=2048)
    whole, runner.num_blocks = runner.num_blocks, blocks
    core = EngineCore(runner, SchedulerLimits(1, 2048), speculation=speculation, host_copies=copies)
    runner.num_blocks, runner.draft_model = whole, own
    talks = [list(one) for one in begun]
    steps = tokens = prompts = found = number = 0
    answers: list[list[int]] = []
    for turn in range(turns):
        if turn == 1:
            counting.num_computed = 0
        for talk in talks:
            talk += added[turn] if turn else []
            asked = len(talk)
            core.submit(Submit(number, list(talk), SamplingPlan(max_tokens=osl)))
            number += 1
            answer: list[int] = []
            while core.wait_s is not None:
                report = core.step()
                for update in report.updates if report is not None else ():
                    steps += bool(answer) and bool(update.token_ids)
                    answer += update.token_ids
                    found += (update.reused_blocks or 0) * SIZE if turn else 0
            tokens += len(answer) - 1
            prompts += asked if turn else 0
            talk += answer
            answers.append(answer)
    counts = speculation.counts
    accepted = sum(counts.accepted) / sum(counts.drafted)
    return Row(kind, engine, tokens / steps, accepted, counting.num_computed / prompts, found / prompts, answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=12, help="conversations")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--osl", type=int, default=24)
    parser.add_argument("--most", type=int, default=4, help="max_draft_len")
    args = parser.parse_args()
    model = resolve_checkpoint(MODEL).path
    tokenizer = load_tokenizer(model)
    passages = held_out_passages(args.count + args.turns)
    begun = [tokenizer.encode(text).ids for text in passages[: args.count]]
    added = [tokenizer.encode(text[: len(text) // 3]).ids for text in passages[args.count :]]
    longest = max(map(len, begun)) + sum(map(len, added)) + args.turns * args.osl + args.most
    each = -(-longest // SIZE) + 1  # blocks of a conversation, at most
    few, all_of_them = max(each, each * args.count // 6), each * args.count
    rows: list[Row] = []
    print(f"{'drafter':>12} {'engine':>10} {'tokens a step':>13} {'accepted':>8} {'drafting':>8} {'found':>6}")
    for kind, name in DRAFTS.items():
        runner = create_runner(
            RunnerArgs(
                model_dir=model, dtype="float32", tokens_per_block=SIZE, num_blocks=all_of_them, max_batch_size=1,
                max_draft_len=args.most, draft=DraftArgs(kind, name), cpu_threads=1,
            )
        )  # fmt: skip
        for engine, blocks, has_tier in (
            ("large pool", all_of_them, False), ("host tier", few, True), ("small pool", few, False)
        ):  # fmt: skip
            row = measure(
                runner, kind, engine, blocks, has_tier=has_tier, turns=args.turns, osl=args.osl, most=args.most,
                begun=begun, added=added,
            )  # fmt: skip
            assert not rows or row.answers == rows[0].answers, "an answer changed"
            rows.append(row)
            print(
                f"{kind:>12} {engine:>10} {row.tokens_per_step:>13.3f} {row.accepted:>8.1%} {row.drafting:>8.1%} "
                f"{row.found:>6.1%}", flush=True
            )  # fmt: skip
        runner.close()
    print(json.dumps([{key: value for key, value in asdict(row).items() if key != "answers"} for row in rows]))


if __name__ == "__main__":
    main()
