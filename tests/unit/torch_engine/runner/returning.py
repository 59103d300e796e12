"""Conversations that return: an engine serves them in any order, and their answers can be compared with another's."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any

from eagle_reference import CAPTURED, head_tensors, save_head
from knowing_drafter import KnowingModel
from noisy_drafts import save_noisy, with_tokenizer
from runner_player import VOCAB, build, random_prompt, save
from transformers import PreTrainedModel

from trtx.torch_engine.block_copies import BlockCopies
from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.core.scheduler_limits import SchedulerLimits
from trtx.torch_engine.core.speculation.create import create_speculation
from trtx.torch_engine.core.speculation.speculation import Speculation
from trtx.torch_engine.llm_args import SpeculativeConfig
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.messages import Submit
from trtx.torch_engine.runner import DraftArgs, RunnerArgs
from trtx.torch_engine.runner.host_copies import pools_of
from trtx.torch_engine.step import ModelRunner

SIZE = 8
BLOCKS_EACH = 12  # of a conversation, about
MOST_DRAFTED, RIGHT = 3, 0.6  # RIGHT: share of the drafted tokens that are replaced by right ones
SALTS = (None, "one", "two", "three")


@dataclass
class Turn:
    added: list[int]
    max_tokens: int
    seed: int
    temperature: float
    aborts: int | None  # so many steps after its arrival


@dataclass
class Conversation:
    """One conversation. An answer that was cancelled is no part of what follows."""

    salt: str | None
    turns: list[Turn]
    history: list[int] = field(default_factory=list)
    answers: list[list[Any]] = field(default_factory=list)  # of each turn: (token, the bits of its log-probability)
    cancelled: set[int] = field(default_factory=set)  # turns
    sent: list[list[int]] = field(default_factory=list)  # of each turn: its prompt and what came of its answer

    def most_reused(self, prompt: list[int]) -> int:
        """Tokens at the start of a prompt that this conversation had before; no other one has them under its salt."""
        shared = [sum(takewhile(bool, map(eq, prompt, before))) for before in self.sent]
        return max(shared, default=0)


def conversations(
    seed: int, count: int, requests: int, *, longest: int = 60, longest_answer: int = 5
) -> list[Conversation]:
    """Four conversations each begin with the same prompt under different salts."""
    dice = random.Random(seed)
    found = []
    for index in range(count):
        turns = []
        for turn in range(requests // count):
            added = random_prompt(dice.randint(16, longest), 1000 + index // len(SALTS)) if not turn else None
            turns.append(
                Turn(
                    added or random_prompt(dice.randint(1, 6), dice.randrange(10**6)), dice.randint(1, longest_answer),
                    dice.randrange(2**63), dice.choice([0.0, 1.0]), dice.choice([None] * 5 + [dice.randint(0, 8)]),
                )
            )  # fmt: skip
        found.append(Conversation(SALTS[index % len(SALTS)], turns))
    return found


def play(
    runner: ModelRunner,
    talks: list[Conversation],
    *,
    seed: int,
    num_blocks: int,
    copies: BlockCopies | None = None,
    overlap: bool = True,
    batch: int = 5,
    step_tokens: int = 64,
    waiting: int = 8,
    speculation: Speculation | None = None,
    on_step: Callable[[EngineCore], None] = lambda core: core.check(),
) -> EngineCore:
    """Serves all turns, ``waiting`` at once, on the first ``num_blocks`` blocks of the runner's pool.

    Fails if a request reuses a block that its own conversation did not compute: only other salts have those.
    """
    dice = random.Random(seed)
    whole, runner.num_blocks = runner.num_blocks, num_blocks
    core = EngineCore(
        runner, SchedulerLimits(batch, step_tokens), disable_overlap_scheduler=not overlap, host_copies=copies,
        event_buffer_max_size=1_000_000, speculation=speculation,
    )  # fmt: skip
    runner.num_blocks = whole
    idle = [talk for talk in talks if talk.turns]
    open_: dict[int, tuple[Conversation, list[int]]] = {}
    aborts: dict[int, list[int]] = {}
    most_reused: dict[int, int] = {}  # tokens
    step = next_id = 0
    while idle or open_:
        while idle and len(open_) < waiting:
            talk = idle.pop(dice.randrange(len(idle)))
            turn = talk.turns[len(talk.answers)]
            prompt = talk.history + turn.added
            params = SamplingParams(
                max_tokens=turn.max_tokens, seed=turn.seed, temperature=turn.temperature, logprobs=1, ignore_eos=True
            )
            talk.answers.append([])
            most_reused[next_id] = talk.most_reused(prompt)
            talk.sent.append(list(prompt))
            open_[next_id] = talk, prompt
            core.submit(Submit(next_id, prompt, resolve_sampling(params), cache_salt=talk.salt))
            if turn.aborts is not None:
                aborts.setdefault(step + turn.aborts, []).append(next_id)
            next_id += 1
        core.abort(aborts.pop(step, []))
        report = core.step()
        on_step(core)
        step += 1
        for update in report.updates if report is not None else ():
            assert update.error is None, update.error
            talk, prompt = open_[update.sequence_id]
            reused = (update.reused_blocks or 0) * core.scheduler.pool.tokens_per_block
            assert reused <= most_reused[update.sequence_id], f"{reused} tokens of another conversation"
            talk.sent[-1] += update.token_ids
            for token, logprobs in zip(update.token_ids, update.logprobs or [], strict=True):
                talk.answers[-1].append((token, logprobs[token].logprob.hex()))
            if update.finish_reason is None:
                continue
            del open_[update.sequence_id]
            if update.finish_reason == "cancelled":
                talk.cancelled.add(len(talk.answers) - 1)
            # The last answer is no part of the history if its turn may be cancelled: then both engines agree on it.
            turn = talk.turns[len(talk.answers) - 1]
            answer = [token for token, _ in talk.answers[-1]] if turn.aborts is None else []
            talk.history = prompt + answer
            if len(talk.answers) < len(talk.turns):
                idle.append(talk)
    while core.wait_s is not None:
        core.step()
    core.check()
    assert core.scheduler.pool.num_held == 0
    assert all(token < VOCAB for talk in talks for token in talk.history)
    return core


def assert_same(found: list[Conversation], expected: list[Conversation]) -> None:
    """Asserts that tokens and log-probabilities are equal bit for bit. A cancelled answer may be shorter."""
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        for turn, (answer, same) in enumerate(zip(one.answers, other.answers, strict=True)):
            if turn in one.cancelled or turn in other.cancelled:
                shorter = min(len(answer), len(same))
                answer, same = answer[:shorter], same[:shorter]
            assert answer == same, f"conversation {index}, turn {turn}"


@dataclass(frozen=True)
class Case:
    """An engine with a host tier, and its load."""

    family: str = "qwen3"
    shape: tuple[tuple[str, Any], ...] = ()
    kv_dtype: str = "auto"
    overlap: bool = True
    batch: int = 5
    longest_answer: int = 5
    host_share: int = 1  # the tier holds one of ``host_share`` conversations
    draft: str = ""  # decoding type of a draft model

    @property
    def preempts(self) -> bool:
        """Its sequences outgrow the pool."""
        return self.batch > 5


@dataclass(frozen=True)
class Tiered:
    """A runner, and a function that allocates host memory for its blocks, with a size in bytes for each rank."""

    runner: ModelRunner
    new_copies: Callable[[int], BlockCopies]
    close: Callable[[], None]


def save_draft(kind: str, model: PreTrainedModel, directory: Path) -> DraftArgs:
    """Writes a draft model for ``model``, whose weights change. An EAGLE-3 head has random weights."""
    directory.mkdir()
    if kind == "Eagle3":
        return DraftArgs(kind, str(save_head(directory, head_tensors())), CAPTURED)
    return DraftArgs(kind, str(save_noisy(model, directory)))


def compare(
    directory: Path, case: Case, create: Callable[[RunnerArgs], Tiered], *, count: int, requests: int, share: int
) -> None:
    """Compares the answers of a small pool above host memory with those of a large pool.

    With a draft model, only the small pool's engine drafts.
    """
    model = build(case.family, **{name: list(v) if isinstance(v, tuple) else v for name, v in case.shape})
    (directory / "target").mkdir()
    target = with_tokenizer(save(model, directory / "target"))
    draft = save_draft(case.draft, model, directory / "draft") if case.draft else None
    small, large = count * BLOCKS_EACH // share, count * 32
    tiered = create(
        RunnerArgs(
            model_dir=target, device="cpu", tokens_per_block=SIZE, num_blocks=2 * large,
            max_batch_size=case.batch, deterministic=True, kv_dtype=case.kv_dtype, cpu_threads=1,
            max_num_tokens=16 * case.batch, draft=draft, max_draft_len=MOST_DRAFTED if draft else 0,
        )
    )  # fmt: skip
    runner = tiered.runner
    groups = len(runner.geometry.groups)
    served = partial(
        play, runner, overlap=case.overlap, batch=case.batch, waiting=case.batch + 3, step_tokens=16 * case.batch
    )
    expected = conversations(3, count, requests, longest_answer=case.longest_answer)
    served(expected, seed=1, num_blocks=groups * large, on_step=lambda core: None)
    found = conversations(3, count, requests, longest_answer=case.longest_answer)
    host = count * BLOCKS_EACH // case.host_share if case.host_share > 1 else large
    copies = tiered.new_copies(host * groups * sum(pool[0].nbytes for pool in pools_of(runner)))
    speculation = None
    if case.draft:
        assert runner.draft_model is not None
        known = [sent for talk in expected for sent in talk.sent]
        runner.draft_model = KnowingModel(runner.draft_model, known, right=RIGHT)
        config = SpeculativeConfig(
            decoding_type=case.draft, max_draft_len=MOST_DRAFTED, draft_len_schedule={case.batch: MOST_DRAFTED}
        )
        speculation = create_speculation(config, runner, max_num_tokens=16 * case.batch)
    core = served(found, seed=2, num_blocks=small * groups, copies=copies, speculation=speculation)
    assert_same(found, expected)
    assert core.tier is not None
    tier, cancelled = core.tier.counters, sum(len(talk.cancelled) for talk in found)
    print(f"{requests} requests, {cancelled} cancelled, {core.scheduler.num_preemptions} preemptions; blocks: "
          f"{tier.stored} stored, {tier.loaded} loaded, {tier.evicted} evicted, {tier.dropped} dropped")  # fmt: skip
    assert tier.loaded > requests
    if speculation is not None:
        counts = speculation.counts
        print(f"{counts.drafts} drafts, {sum(counts.accepted)} of {sum(counts.drafted)} tokens accepted")
        assert 0 < sum(counts.accepted) < sum(counts.drafted)
    assert cancelled
    assert bool(tier.evicted) == (case.host_share > 1)
    assert bool(core.scheduler.num_preemptions) == case.preempts
    copies.close()
    tiered.close()
