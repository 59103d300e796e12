"""Measures speculative decoding: speed-up against acceptance, or tokens a step by task.

    python benchmarks/speculation.py --model synthetic:qwen3-8b --batches 1,8,64,256    # one H100, about 240 s
    python benchmarks/speculation.py --model synthetic:tiny --batches 1,4 --osl 16      # a CPU
    python benchmarks/speculation.py --tasks                                            # a CPU, about 1 min

In the first form, acceptance is set by construction: the host takes a scripted token in place of the one that the model
sampled, and the drafter guesses that token with probability ``--right``. The device does the work of a real engine, and
each guess is right with the same probability. ``plain`` has no speculation. ``policy`` is the engine's own choice of
draft lengths; ``fixed`` always verifies ``--most`` tokens. All requests arrive at once. tok/s counts from the first
step in which all of them decode to the first that ends one. ``steps`` is the number of these steps: a rate over few
steps is noise. Rows are medians of ``--rounds``, and each rate is compared to the plain one of its own round. The
second form answers held-out prompts of ``synthetic:tiny-trained`` greedily, and checks that every answer is the one
without speculation. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from trtx.checkpoint import read_end_ids, resolve_checkpoint
from trtx.checkpoint.held_out import held_out_passages, held_out_samples
from trtx.checkpoint.tasks import TASKS
from trtx.text import load_tokenizer
from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.core.scheduler_limits import SchedulerLimits
from trtx.torch_engine.core.speculation.create import create_speculation
from trtx.torch_engine.core.speculation.drafters import Draft, DraftState
from trtx.torch_engine.core.speculation.lengths import DraftLengths
from trtx.torch_engine.core.speculation.model_drafts import ModelDrafts
from trtx.torch_engine.core.speculation.sources import DraftSource, LookupDrafts
from trtx.torch_engine.core.speculation.speculation import Speculation
from trtx.torch_engine.drafting import DraftModel, DraftShare
from trtx.torch_engine.llm_args import SpeculativeConfig
from trtx.torch_engine.messages import Submit
from trtx.torch_engine.runner import DraftArgs, RunnerArgs, TorchRunner, create_runner
from trtx.torch_engine.sampling_plan import SamplingPlan
from trtx.torch_engine.step import Batch, LaunchedStep, Sampled

MOST_TOKENS = 8192  # of a step; prompts take few steps, so that most of a request's steps count


def scripted(position: int, vocab_size: int) -> int:
    return (position * 7919 + 13) % vocab_size


@dataclass
class ScriptedStep:
    """A step whose sampled tokens are replaced by scripted ones."""

    launched: LaunchedStep
    positions: list[int]  # of each sequence's first sampled token
    vocab_size: int

    def results(self) -> list[Sampled]:
        results = self.launched.results()
        for first, result in zip(self.positions, results, strict=True):
            for place, one in enumerate((result, *result.after_drafts)):
                if one.token_id is not None:
                    one.token_id = scripted(first + place, self.vocab_size)
        return results


class ScriptedRunner:
    """A runner that does all of the work, and whose results are scripted."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, batch: Batch) -> ScriptedStep:
        positions = [one.start + len(one.new_token_ids) - one.num_drafts for one in batch.sequences]
        return ScriptedStep(self._runner.launch(batch), positions, self._runner.vocab_size)


@dataclass
class KnownTokens:
    tokens: list[int] = field(default_factory=list)


class ScriptedDraftModel:
    """A draft model that does all of the work, and whose tokens are scripted."""

    def __init__(self, model: DraftModel, drafter: ScriptedDrafter) -> None:
        self.token_shift, self.room, self.pools = model.token_shift, model.room, model.pools
        self._model, self._drafter = model, drafter

    def draft(self, shares: Sequence[DraftShare]) -> list[list[int]]:
        found = self._model.draft(shares)
        begins = [share.start + len(share.tokens) + self.token_shift for share in shares]
        return [self._drafter.guesses(begin, len(one)) for begin, one in zip(begins, found, strict=True)]


class ScriptedDrafter:
    def __init__(self, right: float, vocab_size: int) -> None:
        self._right, self._vocab_size, self._dice = right, vocab_size, random.Random(0)

    def begin(self, cache_salt: str | None) -> KnownTokens:
        return KnownTokens()

    def draft(self, state: DraftState, most: int) -> Draft:
        return Draft(self.guesses(len(state.tokens), most), 1)

    def guesses(self, begin: int, count: int) -> list[int]:
        return [self._guess(position) for position in range(begin, begin + count)]

    def _guess(self, position: int) -> int:
        token = scripted(position, self._vocab_size)
        return token if self._dice.random() < self._right else (token + 1) % self._vocab_size


@dataclass(frozen=True, slots=True)
class DecodeRate:
    """``tokens_per_s`` and ``steps`` are of the time in which all requests decode."""

    tokens_per_s: float
    steps: int
    acceptance_length: float | None


def measure(runner: Any, batch: int, isl: int, osl: int, speculation: Speculation | None) -> DecodeRate:
    core = EngineCore(
        runner, SchedulerLimits(batch, MOST_TOKENS, enable_chunked_prefill=True), enable_block_reuse=False,
        speculation=speculation,
    )  # fmt: skip
    dice = random.Random(batch)
    for number in range(batch):
        prompt = [dice.randrange(runner.vocab_size) for _ in range(isl)]
        core.submit(Submit(number, prompt, SamplingPlan(is_greedy=False, seed=number, max_tokens=osl)))
    begun: set[int] = set()
    tokens, steps, began, now = 0, 0, 0.0, 0.0
    is_whole = True
    while core.wait_s is not None:
        report = core.step()
        updates = report.updates if report is not None else []
        if began and is_whole and updates:
            now = time.perf_counter()
            tokens += sum(len(update.token_ids) for update in updates)
            steps += 1
        is_whole &= not any(update.finish_reason for update in updates)
        begun |= {update.sequence_id for update in updates}
        if len(begun) == batch and not began:
            began = time.perf_counter()
    counts = speculation.counts if speculation is not None else None
    accepted = counts.acceptance_length if counts is not None else None
    return DecodeRate(tokens / (now - began) if now else 0.0, steps, accepted)


def scripted_source(runner: TorchRunner, drafter: ScriptedDrafter) -> DraftSource:
    if runner.draft_model is None:
        return LookupDrafts(drafter)
    model = ScriptedDraftModel(runner.draft_model, drafter)
    return ModelDrafts(model, tokens_per_block=runner.geometry.tokens_per_block, max_num_tokens=MOST_TOKENS)


def by_acceptance(args: argparse.Namespace) -> list[dict[str, Any]]:
    batches = [int(one) for one in args.batches.split(",")]
    rights = [float(one) for one in args.right.split(",")]
    created = create_runner(
        RunnerArgs(
            model_dir=resolve_checkpoint(args.model).path, max_batch_size=max(batches), max_seq_len=args.isl + args.osl,
            max_draft_len=args.most, max_tokens=args.max_tokens,
            draft=DraftArgs(args.drafter, args.draft_model) if args.draft_model else None,
        )
    )  # fmt: skip
    runner = ScriptedRunner(created)

    def scripted_speculation(batch: int, draft: str, right: float) -> Speculation:
        lengths = DraftLengths(args.most, schedule={batch: args.most} if draft == "fixed" else None)
        source = scripted_source(created, ScriptedDrafter(right, created.vocab_size))
        return Speculation(source, lengths, is_asynchronous=created.is_asynchronous)

    print(
        f"{'batch':>5} {'draft':>8} {'right':>5} {'accepted length':>15} {'steps':>5} {'tok/s':>9} "
        f"{'against plain':>13}"
    )
    rows = []
    for batch in batches:
        for one in (None, scripted_speculation(batch, "fixed", 0.0)):
            measure(runner, batch, args.isl, args.osl // 4, one)  # warms up
        variants = [(draft, right) for draft in args.drafts.split(",") for right in rights]
        rounds: list[dict[tuple[str, float], DecodeRate]] = []
        for _ in range(args.rounds):
            rounds.append({PLAIN: measure(runner, batch, args.isl, args.osl, None)})
            for draft, right in variants:
                speculation = scripted_speculation(batch, draft, right)
                rounds[-1][draft, right] = measure(runner, batch, args.isl, args.osl, speculation)
        rows += [shown_row(batch, variant, rounds) for variant in (PLAIN, *variants)]
    runner.close()
    lowest = min((row for row in rows if row["draft"] == "policy"), key=lambda row: row["against_plain"], default=None)
    if lowest is not None:
        print(f"lowest of policy: {lowest['against_plain']:.3f} at batch {lowest['batch']}, right {lowest['right']}")
    return rows


PLAIN = ("plain", 0.0)


def shown_row(
    batch: int, variant: tuple[str, float], rounds: Sequence[dict[tuple[str, float], DecodeRate]]
) -> dict[str, Any]:
    """Prints and returns the medians of a variant over the rounds."""
    found = [one[variant] for one in rounds]
    lengths = [one.acceptance_length for one in found if one.acceptance_length is not None]
    row: dict[str, Any] = {
        "batch": batch,
        "draft": variant[0],
        "right": variant[1],
        "accepted_length": median(lengths) if lengths else None,
        "steps": round(median(one.steps for one in found)),
        "tokens_per_s": median(one.tokens_per_s for one in found),
        "against_plain": median(one[variant].tokens_per_s / one[PLAIN].tokens_per_s for one in rounds),
    }
    shown = "–" if not lengths else f"{row['accepted_length']:.2f}"
    print(
        f"{batch:>5} {variant[0]:>8} {variant[1]:>5.2f} {shown:>15} {row['steps']:>5} {row['tokens_per_s']:>9.0f} "
        f"{row['against_plain']:>13.2f}",
        flush=True,
    )
    return row


@dataclass
class TaskAnswers:
    """The answers to some prompts, and the decode steps that they took."""

    answers: list[list[int]]
    steps: int

    def row(self, task: str, drafter: str) -> dict[str, Any]:
        tokens = sum(map(len, self.answers)) / len(self.answers)
        rate = sum(len(answer) - 1 for answer in self.answers) / max(1, self.steps)
        print(f"{drafter:>12} {task:>12} {len(self.answers):>7} {tokens:>7.1f} {rate:>13.2f}", flush=True)
        return {"task": task, "drafter": drafter, "tokens_per_step": rate, "tokens_per_answer": tokens}


def answered(core: EngineCore, prompts: Sequence[list[int]], ends: tuple[int, ...], osl: int) -> TaskAnswers:
    """Answers prompts one after the other."""
    found = TaskAnswers([], 0)
    for number, prompt in enumerate(prompts):
        answer: list[int] = []
        core.submit(Submit(number, prompt, SamplingPlan(max_tokens=osl, end_ids=ends)))
        while core.wait_s is not None:
            report = core.step()
            for update in report.updates if report is not None else ():
                found.steps += bool(answer) and bool(update.token_ids)
                answer += update.token_ids
        found.answers.append(answer)
    return found


def by_task(args: argparse.Namespace) -> list[dict[str, Any]]:
    model = resolve_checkpoint("synthetic:tiny-trained").path
    always = {1: args.most}
    drafters = {
        "NGram": SpeculativeConfig(
            decoding_type="NGram", max_draft_len=args.most, max_matching_ngram_size=3, draft_len_schedule=always
        ),
        "SA": SpeculativeConfig(decoding_type="SA", max_draft_len=args.most, draft_len_schedule=always),
        "SA, pool": SpeculativeConfig(
            decoding_type="SA", max_draft_len=args.most, draft_len_schedule=always, enable_global_pool=True
        ),
        "Draft_Target": SpeculativeConfig(
            decoding_type="Draft_Target", max_draft_len=args.most, draft_len_schedule=always,
            speculative_model="synthetic:tiny-draft",
        ),
        "Eagle3": SpeculativeConfig(
            decoding_type="Eagle3", max_draft_len=args.most, draft_len_schedule=always,
            speculative_model="synthetic:tiny-eagle3",
        ),
    }  # fmt: skip
    tokenizer = load_tokenizer(model)
    ends = read_end_ids(model)
    asked = {task: [sample.chat()[0] for sample in held_out_samples(task, args.count)] for task in TASKS}
    asked["text"] = [text[: len(text) // 3] for text in held_out_passages(args.count)]
    prompts = {task: [tokenizer.encode(text).ids for text in texts] for task, texts in asked.items()}
    plain: dict[str, TaskAnswers] = {}
    rows = []
    print(f"{'drafter':>12} {'task':>12} {'answers':>7} {'tokens':>7} {'tokens a step':>13}")
    for name, config in {"none": None, **drafters}.items():
        draft = DraftArgs(name, config.draft_model) if config is not None and config.draft_model else None
        runner = create_runner(
            RunnerArgs(
                model_dir=model,
                dtype="float32",
                max_tokens=4096,
                max_batch_size=1,
                max_draft_len=args.most,
                draft=draft,
            )
        )
        found: list[TaskAnswers] = []
        for task, own in prompts.items():
            speculation = create_speculation(config, runner, max_num_tokens=2048) if config is not None else None
            core = EngineCore(runner, SchedulerLimits(1, 2048), speculation=speculation)
            one = answered(core, own, ends, args.osl)
            if config is None:
                plain[task] = one
                continue
            assert one.answers == plain[task].answers, "speculation changed an answer"
            found.append(one)
            rows.append(one.row(task, name))
        if found:
            rows.append(
                TaskAnswers([row for one in found for row in one.answers], sum(o.steps for o in found)).row("all", name)
            )
        runner.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", action="store_true", help="tokens a step by task, instead of speed by acceptance")
    parser.add_argument("--model", default="synthetic:qwen3-8b")
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--right", default="0,0.65,0.8", help="probabilities that a guess is right")
    parser.add_argument("--draft-model", help="it does its work, and its tokens are scripted, too")
    parser.add_argument("--drafter", choices=("Draft_Target", "Eagle3"), default="Eagle3", help="its kind")
    parser.add_argument("--drafts", default="policy,fixed", help="policy, fixed or both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int, default=4, help="max_draft_len")
    parser.add_argument("--isl", type=int, default=128)
    parser.add_argument("--osl", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, help="size of the KV pool")
    parser.add_argument("--count", type=int, default=100, help="prompts of each task")
    args = parser.parse_args()
    print(json.dumps(by_task(args) if args.tasks else by_acceptance(args)))


if __name__ == "__main__":
    main()
