"""Workloads of every kind of request, an engine that serves them, and how its answers are compared."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from runner_player import VOCAB, random_prompt

from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.core.grammars import Grammars
from trtx.torch_engine.core.scheduler_limits import SchedulerLimits
from trtx.torch_engine.core.speculation.speculation import Speculation
from trtx.torch_engine.handoff import KvTransport, create_transport
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.messages import Handoff, Logprob, Submit
from trtx.torch_engine.runner import TorchRunner

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1},
    {"frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"temperature": 2.0, "top_k": 20, "min_p": 0.05, "logprobs": 3},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.5, "min_tokens": 5, "frequency_penalty": 0.4},
    {"min_tokens": 9},
]


@dataclass
class Wish:
    """One request of a workload."""

    arrives: int  # at that step
    prompt: list[int]
    params: dict[str, Any]
    aborts: int | None  # so many steps later

    @property
    def plan(self) -> Any:
        return resolve_sampling(SamplingParams(**self.params))


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    reason: str | None = None
    handoff: Handoff | None = None
    recomputed_because: str = ""


def workload(seed: int, count: int = 14) -> list[Wish]:
    """Of every kind of sampling, some that share prefixes, some that end by a token, some aborted."""
    dice = random.Random(seed)
    wishes, step = [], 0
    for index in range(count):
        step += dice.choice([0, 0, 1, 3])
        length = dice.randint(1, 40)
        prompt = random_prompt(40, dice.randint(0, 2))[:length] if dice.random() < 0.6 else random_prompt(length, index)
        kind = KINDS[dice.randrange(len(KINDS))]
        params = kind | {
            "max_tokens": dice.randint(kind.get("min_tokens", 1), 32), "seed": dice.randrange(2**64),
            "stop_token_ids": dice.sample(range(VOCAB), dice.choice([0, 12, 40])), "include_stop_str_in_output": True,
        }  # fmt: skip
        wishes.append(Wish(step, prompt, params, dice.choice([None, None, None, dice.randint(0, 9)])))
    return wishes


def handoff_workload(seed: int) -> list[Wish]:
    """:func:`workload` without the log-probabilities of prompts, which only prefill has."""
    return [wish for wish in workload(seed) if "prompt_logprobs" not in wish.params]


def accepted(speculation: Speculation | None) -> int:
    """Returns the number of drafted tokens that were accepted."""
    return sum(speculation.counts.accepted) if speculation is not None else 0


class Engine:
    """A core, and what its client has got."""

    def __init__(
        self,
        runner: TorchRunner,
        *,
        overlap: bool,
        transport: KvTransport | None = None,
        step_tokens: int = 24,
        grammars: Grammars | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.core = EngineCore(
            runner, SchedulerLimits(5, step_tokens), disable_overlap_scheduler=not overlap, transport=transport,
            event_buffer_max_size=10_000, grammars=grammars, speculation=speculation,
        )  # fmt: skip
        self.answers: dict[int, Answer] = {}
        self.paused = 0

    def step(self) -> None:
        report = self.core.step()
        self.core.check()
        self.paused += sum(sequence.is_resumed for sequence in self.core.scheduler.waiting)
        for update in report.updates if report is not None else ():
            assert update.error is None, update.error
            answer = self.answers.setdefault(update.sequence_id, Answer())
            assert answer.reason is None, "nothing comes after the end"
            answer.tokens += update.token_ids
            answer.logprobs += update.logprobs or []
            answer.prompt_logprobs += update.prompt_logprobs or []
            answer.reason = update.finish_reason
            answer.handoff = update.handoff
            if update.transfer is not None:
                answer.recomputed_because = update.transfer.recomputed_because

    @property
    def is_idle(self) -> bool:
        scheduler = self.core.scheduler
        return not (scheduler.running or scheduler.waiting or scheduler.reading or self.core.wait_s == 0.0)

    def finish(self) -> None:
        for _ in range(2000):
            if self.is_idle:
                break
            self.step()
        assert self.is_idle
        assert self.core.scheduler.pool.num_held == 0


def served(
    runner: TorchRunner,
    wishes: list[Wish],
    *,
    overlap: bool,
    step_tokens: int = 24,
    speculation: Speculation | None = None,
) -> tuple[dict[int, Answer], int]:
    """(answers, steps in which a preempted sequence waited)"""
    engine = Engine(runner, overlap=overlap, step_tokens=step_tokens, speculation=speculation)
    aborts: dict[int, list[int]] = {}
    for step in range(wishes[-1].arrives + 20):
        for index, wish in enumerate(wishes):
            if wish.arrives == step:
                engine.core.submit(Submit(index, wish.prompt, wish.plan))
                if wish.aborts is not None:
                    aborts.setdefault(step + wish.aborts, []).append(index)
        engine.core.abort(aborts.pop(step, []))
        engine.step()
    engine.finish()
    return engine.answers, engine.paused


def served_by_two_engines(wish: Wish, new_engine: Callable[[], Engine]) -> list[int]:
    """Serves a request in one engine for a few steps, and to its end in another one. Returns the tokens of both.

    As after the death of its worker: Dynamo sends the prompt and the answer so far to another one.
    """
    tokens: list[int] = []
    for steps in (4, 40):
        left = {"max_tokens": wish.params["max_tokens"] - len(tokens)}
        rest = Wish(0, wish.prompt + tokens, wish.params | left, None)
        engine = new_engine()
        engine.core.submit(Submit(0, rest.prompt, rest.plan))
        for _ in range(steps):
            engine.step()
        tokens += engine.answers[0].tokens
        engine.core.abort([0])
        engine.finish()
    return tokens


@contextmanager
def connected(runners: Sequence[TorchRunner]) -> Iterator[list[KvTransport]]:
    """The transports of engines in one process, which are closed at the end."""
    transports = [create_transport(one.pool, one.geometry, routes=["direct"]) for one in runners]
    try:
        yield transports
    finally:
        for one in transports:
            one.close()


def served_over_a_handoff(
    runners: tuple[TorchRunner, TorchRunner],
    transports: Sequence[KvTransport],
    wishes: list[Wish],
    speculations: tuple[Speculation | None, Speculation | None] = (None, None),
) -> Engine:
    """Serves each request on a prefill and then on a decode engine. Returns the decode engine with all answers.

    Each pair is of the prefill and the decode engine.
    """
    prefill, decode = (
        Engine(runner, overlap=True, transport=end, speculation=speculation)
        for runner, end, speculation in zip(runners, transports, speculations, strict=True)
    )
    aborts: dict[int, int] = {}
    for step in range(2000):
        for index, wish in enumerate(wishes):
            if wish.arrives == step:
                prefill.core.submit(Submit(index, wish.prompt, wish.plan, handoff=Handoff("context_only")))
        prefill.step()
        for index, answer in prefill.answers.items():
            if answer.handoff is not None:
                told = answer.handoff
                answer.handoff = None
                if answer.reason == "stop":  # as its worker ends it there
                    decode.answers[index] = answer
                    continue
                begun = Handoff(
                    "generation_only", told.first_gen_tokens, told.first_gen_log_probs, opaque_state=told.opaque_state
                )
                decode.core.submit(Submit(index, wishes[index].prompt, wishes[index].plan, handoff=begun))
                if (after := wishes[index].aborts) is not None:
                    aborts[index] = step + after
        decode.core.abort([index for index, at in aborts.items() if at == step])
        decode.step()
        if len(decode.answers) == len(wishes) and decode.is_idle and step > max(aborts.values(), default=0):
            break
    decode.finish()
    # Releases come from a thread of the transport. A lease that is not released holds its blocks for 60 s.
    deadline = time.monotonic() + 20
    while prefill.core.scheduler.pool.num_held and time.monotonic() < deadline:
        prefill.step()
        time.sleep(0.001)
    prefill.finish()
    return decode


def assert_equal(found: dict[int, Answer], expected: dict[int, Answer], wishes: list[Wish]) -> None:
    for index, wish in enumerate(wishes):
        one, other = found[index], expected[index]
        if "cancelled" in (one.reason, other.reason):
            shorter = min(len(one.tokens), len(other.tokens))
            assert one.tokens[:shorter] == other.tokens[:shorter], wish
            continue
        assert (one.tokens, one.reason) == (other.tokens, other.reason), wish
        assert len(one.logprobs) == (len(one.tokens) if "logprobs" in wish.params else 0), wish
        assert len(one.prompt_logprobs) == (len(wish.prompt) - 1 if "prompt_logprobs" in wish.params else 0), wish
        for ours, theirs in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
            assert len(ours) == len(theirs), wish
            for entry, same in zip(ours, theirs, strict=True):
                assert [(token, value.rank) for token, value in entry.items()] == [
                    (token, value.rank) for token, value in same.items()
                ]
                values = [value.logprob for value in same.values()]
                assert [value.logprob for value in entry.values()] == pytest.approx(values, abs=1e-3)
