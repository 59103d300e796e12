"""What is asked of a server, and what becomes of each answer: over HTTP, of a server that shows likeliest tokens."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loopback import Handler, serving

from trtx.errors import Interrupted, NoVerdictError
from trtx.evals.fidelity import TopologyFidelity, read_fidelity
from trtx.evals.fidelity.asking import ask_served
from trtx.evals.fidelity.forms import DIRECTORY, ReferenceSequence, read_compared
from trtx.evals.messages import Endpoint, EvalProgress

pytestmark = pytest.mark.slow

VOCABULARY, LENGTH = 50, 12


def logprobs(ids: list[int], noise: float) -> np.ndarray:
    """Of each position but the first, over the vocabulary: a function of the tokens before it."""
    rows = []
    for at in range(1, len(ids)):
        draw = np.random.default_rng(ids[:at])
        logits = draw.normal(0, 3, VOCABULARY) + noise * draw.normal(0, 1, VOCABULARY)
        rows.append(logits - np.log(np.exp(logits).sum()))
    return np.array(rows)


def shown(ids: list[int], top: int, noise: float) -> list[dict[int, float]]:
    found = []
    for own, row in zip(ids[1:], logprobs(ids, noise), strict=True):
        found.append({int(token): float(row[token]) for token in (own, *np.argsort(-row)[:top])})
    return found


def sequences(count: int = 12) -> tuple[ReferenceSequence, ...]:
    found = []
    for index in range(count):
        ids = np.random.default_rng(index).integers(0, VOCABULARY, LENGTH).tolist()
        rows = shown(ids, 20, 0)
        tops = tuple(tuple(row) for row in rows), tuple(tuple(row.values()) for row in rows)
        found.append(ReferenceSequence(index, 4, tuple(ids), *tops))
    return tuple(found)


@dataclass
class Server:
    """``way``: engine_data or prompt_logprobs, how it shows them. ``most``: likeliest tokens that it shows. ``fails``:
    prompts, by their tokens, that it answers with an error. ``lasts``: answers after which it is gone."""

    way: str = "engine_data"
    most: int = 20
    noise: float = 0.0
    context: int = 4096
    fails: tuple[tuple[int, ...], ...] = ()
    lasts: int = 10_000
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        ids, top = body["prompt"], body["prompt_logprobs"]
        if ("nvext" in body) != (self.way == "engine_data"):
            return 400, {"error": {"message": "nvext is not what is said here"}}
        if top > self.most:
            return 400, {"error": {"message": f"prompt_logprobs is {top}, expected {self.most} at most"}}
        if tuple(ids) in self.fails:
            return 400, {"error": {"message": "not this one"}}
        found = shown(ids, top, self.noise)
        rows: list[Any] = [None, *({str(token): {"logprob": row[token], "rank": 1} for token in row} for row in found)]
        choice = {"index": 0, "text": "x", "finish_reason": "length"}
        if self.way == "engine_data":
            return 200, {"choices": [choice], "nvext": {"engine_data": {"prompt_logprobs": rows}}}
        return 200, {"choices": [{**choice, "prompt_logprobs": rows}]}


@contextlib.contextmanager
def served(**said: Any) -> Iterator[Server]:
    of = Server(**said)

    class Asked(Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            is_gone = len(of.asked) >= of.lasts
            self.answer(200, {"data": [] if is_gone else [{"id": "model", "context_window": of.context}]})

        def do_POST(self) -> None:
            body = self.asked()
            if len(of.asked) >= of.lasts:
                self.answer(503, {"error": "gone"})
                return
            of.asked.append(body)
            self.answer(*of.answer(body))

    with serving(Asked) as of.url:
        yield of


def ask(server: Server, run_dir: Path, **more: Any) -> TopologyFidelity:
    endpoint = Endpoint("agg", server.url, "model", str(run_dir / DIRECTORY / "agg"), patience_s=0.0)
    given: dict[str, Any] = {"check": lambda: None, "on_progress": lambda progress: None} | more
    return ask_served(endpoint, given.pop("of", sequences()), 4, **given)


@pytest.mark.parametrize("way", ["engine_data", "prompt_logprobs"])
def test_both_ways_to_show_them_are_read_and_an_equal_engine_does_not_diverge(way: str, tmp_path: Path) -> None:
    told: list[EvalProgress] = []
    with served(way=way) as server:
        found = ask(server, tmp_path, on_progress=told.append)
    assert (found.route, found.top, found.answered, found.note) == (way, 20, 12, None)
    assert read_fidelity(tmp_path, "agg") == found
    for part, positions in (("text", 12 * (LENGTH - 4)), ("prompt", 12 * 3)):
        figures = next(one for one in found.parts if one.part == part)
        assert figures.positions == positions and figures.kl.value < 1e-7 and figures.agreement.value == 1
    assert (told[-1].done, told[-1].total) == (12, 12)


def test_what_differs_shows_and_is_kept_position_by_position(tmp_path: Path) -> None:
    with served(noise=0.5) as server:
        found = ask(server, tmp_path)
    text = found.part("text")
    lines = read_compared(tmp_path / DIRECTORY / "agg")
    assert text is not None and [one.index for one in lines] == list(range(12))
    kept = [value for one in lines for value in one.kl[one.positions("text")]]
    exact = []
    for one in sequences():
        p, q = (logprobs(list(one.tokens), noise)[one.prompt_length - 1 :] for noise in (0.0, 0.5))
        exact += (np.exp(p) * (p - q)).sum(axis=1).tolist()
    assert all(shown <= whole + 1e-5 for shown, whole in zip(kept, exact, strict=True))
    assert text.kl.value == pytest.approx(math.fsum(kept) / len(kept)) and text.kl.value > 0.9 * np.mean(exact)


def test_a_server_that_shows_fewer_is_asked_for_what_it_shows(tmp_path: Path) -> None:
    with served(most=5, noise=0.5) as server:
        found = ask(server, tmp_path)
        assert [body["prompt_logprobs"] for body in server.asked] == [20, 10, 5] + [5] * 12
    assert found.top == 5 and found.answered == 12


def test_a_server_that_shows_none_is_told_with_what_it_said(tmp_path: Path) -> None:
    with served(most=-1) as server:
        found = ask(server, tmp_path)
    assert not found.parts and found.top is None and found.note is not None
    assert "asked with engine_data: HTTP 400: " in found.note and "asked with prompt_logprobs: HTTP 400" in found.note


def test_what_has_no_answer_is_told_and_asked_for_again_and_nothing_else(tmp_path: Path) -> None:
    first, second = sequences()[3].tokens, sequences()[7].tokens
    with served(fails=(first, second)) as server:
        found = ask(server, tmp_path)
    assert (found.sequences, found.answered) == (12, 10)
    (reason,) = found.unanswered
    assert (reason.count, reason.first) == (2, 3) and "not this one" in reason.reason
    with served() as server:
        assert ask(server, tmp_path).answered == 12
        assert sorted(tuple(body["prompt"]) for body in server.asked[1:]) == sorted([first, second])  # at once
    assert [one.index for one in read_compared(tmp_path / DIRECTORY / "agg")] == list(range(12))


def test_a_sequence_that_the_context_does_not_hold_is_not_sent(tmp_path: Path) -> None:
    with served(context=LENGTH) as server:
        found = ask(server, tmp_path)
        assert len(server.asked) == 1
    assert found.answered == 0 and f"holds {LENGTH}" in found.unanswered[0].reason


def test_a_server_that_is_gone_ends_it_with_what_is_kept(tmp_path: Path) -> None:
    with served(lasts=6) as server, pytest.raises(NoVerdictError, match="5 of 12 sequences answered"):
        ask(server, tmp_path)
    assert len(read_compared(tmp_path / DIRECTORY / "agg")) == 5 and read_fidelity(tmp_path, "agg") is None


def test_an_interruption_ends_it(tmp_path: Path) -> None:
    calls = iter(range(100))

    def check() -> None:
        if next(calls) > 0:
            raise Interrupted(2)

    with served() as server, pytest.raises(Interrupted):
        ask(server, tmp_path, check=check, of=sequences(2000))
    assert read_fidelity(tmp_path, "agg") is None
