"""Thousands of sampled answers follow their schemas, whatever drafts them and whatever happens to workers meanwhile.

``TRTX_GUIDED_ANSWERS=1000`` asks for fewer. ``TRTX_GUIDED_FIRST`` is the number of the first answer. The number decides
the schema and the seed, so that several runs side by side can ask for different answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from generated_schemas import generated_schema
from guided_answers import OWN, GuidedAnswer, ask
from processes import HTTP, Child, Topology, topology

from trtx.checkpoint import resolve_checkpoint
from trtx.experiment.worker_counters import draft_counts

pytestmark = pytest.mark.proof

ANSWERS = int(os.environ.get("TRTX_GUIDED_ANSWERS", "10000"))
FIRST = int(os.environ.get("TRTX_GUIDED_FIRST", "0"))
SCHEMAS = 300
CLIENTS = 12
MAX_TOKENS = 400
CHAT = "chat/completions"
TORCH: dict[str, Any] = {
    "max_seq_len": 768,
    "max_batch_size": 16,
    # less than the clients' longest answers take together: sequences are preempted
    "kv_cache_config": {"tokens_per_block": 16, "max_tokens": 1536},
}
FREE = {"max_tokens": 24, "nvext": {"token_data": [5, 6, 7, 8]}}
"""A request without a grammar, whose answers must not change beside others."""


@dataclass(frozen=True)
class Setup:
    """The model, and how the second topology drafts."""

    name: str
    model: str = "synthetic:tiny"  # its weights are random
    drafts: str | None = None
    draft_model: str | None = None

    @property
    def speculation(self) -> dict[str, Any]:
        if self.drafts is None:
            return {}
        spec = {"decoding_type": self.drafts, "max_draft_len": 3, "draft_len_schedule": {16: 3}}
        return {"speculative_config": spec | ({"speculative_model": self.draft_model} if self.draft_model else {})}


PLAIN = Setup("plain")
DRAFTING = (
    Setup("NGram", drafts="NGram"),
    # trained with their draft models, which random weights never agree with
    Setup("Draft_Target", "synthetic:tiny-trained", "Draft_Target", "synthetic:tiny-draft"),
    Setup("Eagle3", "synthetic:tiny-trained", "Eagle3", "synthetic:tiny-eagle3"),
)


@dataclass(frozen=True)
class Asked:
    """Answer ``number`` and when it was open, by the monotonic clock."""

    number: int
    answer: GuidedAnswer
    began: float
    ended: float

    def was_open_during(self, span: tuple[float, float]) -> bool:
        return self.began <= span[1] and self.ended >= span[0]


@contextlib.contextmanager
def serving(
    directory: Path, model: str, roles: tuple[str, ...], drafts: dict[str, Any], **ready: int
) -> Iterator[Topology]:
    with topology(directory, resolve_checkpoint(model).path) as running:
        running.start_frontend("--migration-limit", "3")
        for number, role in enumerate(roles):
            start(running, f"{role}-{number}", role, drafts)
        running.wait_ready(**ready)
        yield running


def start(running: Topology, name: str, role: str, drafts: dict[str, Any]) -> Child:
    return running.start_worker(name, role=role, engine="torch", flags=("--deterministic",), **TORCH, **drafts)


def answer_of(running: Topology, number: int) -> Asked:
    schema = generated_schema(number % SCHEMAS)
    form: dict[str, Any] = {"guided_json": schema}
    if number % 2:
        form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    began = time.monotonic()
    answer = ask(running, CHAT, stream=number % 3 == 0, **form, seed=number, temperature=1, max_tokens=MAX_TOKENS)
    return Asked(number, answer, began, time.monotonic())


def cancelled(running: Topology, number: int) -> None:
    """A stream whose client leaves after the first event."""
    schema = generated_schema(number % SCHEMAS)
    body = {"model": running.model_name, **OWN[CHAT], "guided_json": schema, "stream": True}
    with contextlib.suppress(httpx.HTTPError), HTTP.stream("POST", f"{running.url}/v1/{CHAT}", json=body) as stream:
        next(stream.iter_lines())


def asked_of(running: Topology, victim: Child, answers: int) -> tuple[list[Asked], tuple[float, float]]:
    """The answers, and the time from the death of ``victim``'s engine, after half of them, to its own end."""
    plain = ask(running, CHAT, **FREE)
    dying = (0.0, 0.0)
    with ThreadPoolExecutor(CLIENTS) as pool:
        waiting, free, gone = [], [], []
        for count, number in enumerate(range(FIRST, FIRST + answers)):
            waiting.append(pool.submit(answer_of, running, number))
            if number % 10 == 0:
                gone.append(pool.submit(cancelled, running, number))
                free.append(pool.submit(ask, running, CHAT, **FREE))
            if count == answers // 2:
                waiting[count].result()
                os.kill(victim.status()["engine_pid"], signal.SIGKILL)
                killed = time.monotonic()
                assert victim.process.wait(30) == 4
                dying = killed, time.monotonic()
        found = [one.result() for one in waiting]
        for one in gone:
            one.result()
        assert all(one.result() == plain for one in free)
    return found, dying


def lost_by(found: list[Asked], dying: tuple[float, float]) -> list[Asked]:
    """The answers that ended with an error and were open, or sent, while a worker died."""
    return [one for one in found if one.answer.error and one.was_open_during(dying)]


def problem_of(asked: Asked) -> str | None:
    """What is wrong with an answer; None for a valid one, and for one that ``max_tokens`` cut."""
    answer = asked.answer
    if answer.finish_reason == "length" and not answer.error:
        return None
    if not answer.is_whole:
        return f"{asked.number}: HTTP {answer.status}, {answer.finish_reason}, {answer.error}"
    checker = jsonschema.Draft202012Validator(
        generated_schema(asked.number % SCHEMAS), format_checker=jsonschema.FormatChecker()
    )
    try:
        error = jsonschema.exceptions.best_match(checker.iter_errors(json.loads(answer.text)))
    except ValueError as invalid:
        return f"{asked.number}: {invalid} in {answer.text!r}"
    return None if error is None else f"{asked.number}: {error.message} in {answer.text!r}"


@pytest.mark.parametrize(
    ("setup", "count"),
    [(PLAIN, ANSWERS), *((setup, min(ANSWERS, 4000) // len(DRAFTING)) for setup in DRAFTING)],
    ids=[setup.name for setup in (PLAIN, *DRAFTING)],
)
def test_no_answer_is_invalid_and_none_differs_where_prefill_and_decode_are_apart(
    tmp_path: Path, setup: Setup, count: int
) -> None:
    """The workers of the second topology draft."""
    (tmp_path / "agg").mkdir()
    (tmp_path / "disagg").mkdir()
    with serving(tmp_path / "agg", setup.model, ("agg", "agg"), {}, aggregated=2) as running:
        agg, agg_dying = asked_of(running, running.children[1], count // 2)
    roles = ("prefill", "decode", "decode")
    with serving(tmp_path / "disagg", setup.model, roles, setup.speculation, prefill=1, decode=2) as running:
        disagg, disagg_dying = asked_of(running, running.children[2], count // 2)
        metrics = HTTP.get(f"http://127.0.0.1:{running.children[3].system_port}/metrics").content
    # a worker's death ends its answers with an error: Dynamo never migrates a request with a grammar (seen with 1.6.1)
    agg_lost, disagg_lost = lost_by(agg, agg_dying), lost_by(disagg, disagg_dying)
    asked = [one for one in (*agg, *disagg) if one not in agg_lost and one not in disagg_lost]
    problems = [problem for one in asked if (problem := problem_of(one)) is not None]
    ends = Counter(one.answer.finish_reason for one in asked)
    compared = [
        (one, other) for one, other in zip(agg, disagg, strict=True) if one not in agg_lost and other not in disagg_lost
    ]
    differing = [one.number for one, other in compared if one.answer != other.answer]
    counts = draft_counts(metrics)
    print(
        f"{setup.name}: {len(asked)} answers: {dict(ends)}; lost: {len(agg_lost)}, {len(disagg_lost)}; "
        f"{len(compared)} pairs; {counts.accepted if counts else 0} accepted drafts of a worker"
    )
    assert not problems, f"{len(problems)} invalid: {problems[:5]}"
    assert not differing, f"{len(differing)} differ: {differing[:20]}"
    assert ends["stop"] > 0.8 * ends.total()
    assert bool(counts and counts.accepted) == bool(setup.drafts)
    assert max(len(agg_lost), len(disagg_lost)) <= 3 * CLIENTS
