"""Requests a served engine's log-probabilities of the reference's texts, and compares them position by position."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtx.bench.answers import model_name
from trtx.bench.named_models import other_models
from trtx.config.wording import counted
from trtx.errors import NoVerdictError
from trtx.evals.fidelity import forms
from trtx.evals.fidelity.divergence import compare
from trtx.evals.fidelity.figures import part_figures
from trtx.evals.fidelity.forms import COMPARED, FIDELITY, TOP, ComparedSequence, TopologyFidelity
from trtx.evals.forms import Unanswered
from trtx.evals.lines import LineWriter
from trtx.evals.messages import Endpoint, EvalProgress
from trtx.evals.session.client import Client, ServerGone, ServerRefusal
from trtx.evals.session.prompt_logprobs import EngineData, InChoice

_TOPS = (TOP, 10, 5, 1)  # a server may allow fewer
_POLL_S = 0.1
_PROBE_TOKENS = 8


def ask_served(
    endpoint: Endpoint,
    sequences: Sequence[forms.ReferenceSequence],
    concurrency: int,
    *,
    check: Callable[[], None],
    on_progress: Callable[[EvalProgress], None],
) -> TopologyFidelity:
    """Requests every sequence without a stored comparison, and writes ``fidelity.json``.

    ``check`` is called meanwhile and may raise. Raises NoVerdictError if the server is gone; the answers so far are on
    disk then.
    """
    asking = _Asking(endpoint, sequences, on_progress)
    try:
        found = asyncio.run(asking.run(concurrency, check))
    except ServerGone as error:
        raise NoVerdictError(
            f"{error}; {len(asking.compared)} of {counted(len(sequences), 'sequence')} answered"
        ) from error
    FIDELITY.write(Path(endpoint.directory), found)
    return found


@dataclass(frozen=True, slots=True)
class _Served:
    """One answer: natural log-probabilities by token id for each position except the first, and the model's name."""

    rows: list[dict[int, float]]
    model: str | None


class _Asking:
    """Compares all sequences on one topology."""

    def __init__(
        self,
        endpoint: Endpoint,
        sequences: Sequence[forms.ReferenceSequence],
        on_progress: Callable[[EvalProgress], None],
    ) -> None:
        self._endpoint, self._sequences, self._on_progress = endpoint, sequences, on_progress
        self._writer = LineWriter(Path(endpoint.directory), COMPARED)
        keys = {one.index: _key(one) for one in sequences}
        kept = forms.read_compared(Path(endpoint.directory))
        self.compared = {one.index: one for one in kept if keys.get(one.index) == one.key}
        self._kept = len(self.compared)
        self._refusals: dict[int, str] = {}
        self._route: EngineData | InChoice = EngineData()
        self._context_length: int | None = None

    async def run(self, concurrency: int, check: Callable[[], None]) -> TopologyFidelity:
        """Requests all missing sequences. Raises ServerGone, and the exceptions of ``check``."""
        async with Client(self._endpoint, concurrency) as client:
            self._context_length = await client.context_length()
            top = await self._find_top(client)
            if isinstance(top, str):
                return self._found(None, f"the server gives no log-probabilities of prompts ({top})")
            self._report()
            left = (one for one in self._sequences if one.index not in self.compared)
            tasks = [asyncio.create_task(self._worker(client, left, top)) for _ in range(concurrency)]
            await _all(tasks, check)
        found = self._found(top, None)
        self._writer.replace(self.compared[index] for index in sorted(self.compared))
        return found

    async def _find_top(self, client: Client) -> int | str:
        """The number of alternatives per position that the server gives, by the first route that works; else its
        refusals.
        """
        probe = list(self._sequences[0].tokens[:_PROBE_TOKENS])
        sentences = []
        for route in (EngineData(), InChoice()):
            self._route = route
            reason = ""
            for top in _TOPS:
                served = await self._ask(client, probe, top)
                if not isinstance(served, ServerRefusal):
                    return top
                reason = served.reason
            sentences.append(f"asked with {route.name}: {reason}")
        return "; ".join(sentences)

    async def _ask(self, client: Client, ids: list[int], top: int) -> _Served | ServerRefusal:
        answer = await client.ask(self._route.question(ids, top))
        if isinstance(answer, ServerRefusal):
            return answer
        rows = self._route.rows(answer, ids, len(ids) - 1)
        return rows if isinstance(rows, ServerRefusal) else _Served(rows, model_name(answer.get("model")))

    async def _worker(self, client: Client, left: Iterator[forms.ReferenceSequence], top: int) -> None:
        for sequence in left:
            found = await self._compared(client, sequence, top)
            if isinstance(found, ServerRefusal):
                self._refusals[sequence.index] = found.reason
            else:
                self.compared[sequence.index] = found
                self._writer.add(found)
            self._report()

    async def _compared(
        self, client: Client, sequence: forms.ReferenceSequence, top: int
    ) -> ComparedSequence | ServerRefusal:
        ids = list(sequence.tokens)
        if self._context_length is not None and len(ids) >= self._context_length:
            return ServerRefusal(
                f"it has {len(ids)} tokens and asks for one more, and the engine's context holds {self._context_length}"
            )
        served = await self._ask(client, ids, top)
        if isinstance(served, ServerRefusal):
            return served
        reference = sequence.rows(top)
        positions = [compare(before, after, top) for before, after in zip(reference, served.rows, strict=True)]
        return ComparedSequence(
            index=sequence.index,
            key=_key(sequence),
            prompt_length=sequence.prompt_length,
            kl=tuple(round(one.kl, 9) for one in positions),
            agrees=tuple(one.agrees for one in positions),
            shared=tuple(round(one.shared, 6) for one in positions),
            reference_logprob=tuple(row[token] for token, row in zip(ids[1:], reference, strict=True)),
            served_logprob=tuple(round(row[token], 7) for token, row in zip(ids[1:], served.rows, strict=True)),
            models=() if served.model is None else (served.model,),
        )

    def _found(self, top: int | None, note: str | None) -> TopologyFidelity:
        ordered = [self.compared[index] for index in sorted(self.compared)]
        figures = (part_figures(ordered, "text"), part_figures(ordered, "prompt"))
        reasons = Counter(self._refusals.values())
        return TopologyFidelity(
            topology=self._endpoint.topology,
            route=None if top is None else self._route.name,
            top=top,
            sequences=len(self._sequences),
            answered=len(ordered),
            parts=tuple(one for one in figures if one is not None),
            unanswered=tuple(
                Unanswered(reason, count, min(index for index, refusal in self._refusals.items() if refusal == reason))
                for reason, count in reasons.most_common()
            ),
            note=note,
            others=other_models(self._endpoint.model, (one.models for one in ordered)),
        )

    def _report(self) -> None:
        done = len(self.compared) + len(self._refusals)
        self._on_progress(
            EvalProgress(
                self._endpoint.topology, "sequences", done, len(self.compared), len(self._sequences), self._kept,
                None, None, None, None,
            )
        )  # fmt: skip


async def _all(tasks: Sequence[asyncio.Task[None]], check: Callable[[], None]) -> None:
    """Waits for all tasks, cancelling them if one raises; then re-raises its exception."""
    pending = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, timeout=_POLL_S, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            check()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # several tasks may have failed at once


def _key(sequence: forms.ReferenceSequence) -> str:
    content = [sequence.prompt_length, sequence.tokens]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
