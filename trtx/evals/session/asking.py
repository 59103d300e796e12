"""Requests every unanswered sample from one topology, and scores the answers."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lm_eval.api.instance import Instance

from trtx.bench.named_models import other_models
from trtx.config.wording import counted
from trtx.evals import needle, structured
from trtx.evals.forms import (
    EVAL,
    Judged,
    Sample,
    SampleRequest,
    SampleWriter,
    Score,
    ScoredTask,
    TopologyScores,
    Unanswered,
    read_samples,
)
from trtx.evals.messages import Endpoint, EvalJob, EvalProgress
from trtx.evals.session import scoring
from trtx.evals.session.arms import of_arm
from trtx.evals.session.client import Client, ServerGone, ServerRefusal
from trtx.evals.session.loaded_tasks import LoadedTask, LoadedTasks, TaskDocument, version_of
from trtx.evals.session.model import ServedModel
from trtx.evals.session.prompt_logprobs import PromptLogprobs, find_route
from trtx.stats.intervals import CONFIDENCE, Interval
from trtx.stats.proportions import wilson_interval

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 4


@dataclass(slots=True)
class _Asking:
    """One document while its requests run."""

    document: TaskDocument
    answers: list[SampleRequest | ServerRefusal | None]

    @property
    def refusal(self) -> ServerRefusal | None:
        return next((one for one in self.answers if isinstance(one, ServerRefusal)), None)

    @property
    def complete(self) -> tuple[SampleRequest, ...] | None:
        found = tuple(one for one in self.answers if isinstance(one, SampleRequest))
        return found if len(found) == len(self.answers) else None

    @property
    def is_over(self) -> bool:
        return None not in self.answers


@dataclass(slots=True)
class _Running:
    """The running mean of a task's first metric, if all its samples are 0 or 1."""

    metric: str | None = None
    ones: int = 0
    count: int = 0
    is_binary: bool = True

    def add(self, sample: Sample) -> None:
        if not sample.judgements or not sample.judgements[0].metrics:
            return
        (metric, value), *_ = sample.judgements[0].metrics.items()
        self.metric = metric
        self.count += 1
        self.is_binary = self.is_binary and value in (0, 1)
        self.ones += value if self.is_binary else 0

    @property
    def interval(self) -> Interval | None:
        """Wilson's interval of the share of ones; None if a value is neither 0 nor 1."""
        if not (self.count and self.is_binary):
            return None
        return Interval(self.ones / self.count, *wilson_interval(self.ones, self.count), CONFIDENCE)


@dataclass(slots=True)
class _TaskRun:
    """One task on one topology."""

    loaded: LoadedTask
    writer: SampleWriter
    kept: dict[int, Sample] = field(default_factory=dict)  # by doc_id, from an earlier attempt
    samples: dict[int, Sample] = field(default_factory=dict)  # all, by doc_id
    refusals: dict[int, str] = field(default_factory=dict)
    note: str | None = None  # why it isn't asked
    unjudged: str | None = None  # why a sample couldn't be judged, e.g. an error in the task's code
    running: _Running = field(default_factory=_Running)

    @property
    def done(self) -> int:
        return len(self.samples) + len(self.refusals)


class TopologyTasks:
    """All tasks on one topology. ``tell`` is called after each sample."""

    def __init__(
        self,
        job: EvalJob,
        tasks: LoadedTasks,
        model: ServedModel,
        endpoint: Endpoint,
        tell: Callable[[EvalProgress], None],
    ) -> None:
        self._job = job
        self._loaded = tasks
        self._endpoint = endpoint
        self._tell = tell
        self._model = ServedModel(model.tokenizer, endpoint_type=job.endpoint_type, endpoint=endpoint)
        directory = Path(endpoint.directory)
        self._runs = [_TaskRun(one, SampleWriter(directory / one.name)) for one in tasks.tasks]

    async def run(self) -> TopologyScores:
        """Requests and scores everything. Raises ServerGone, with the answers so far on disk."""
        (Path(self._endpoint.directory) / EVAL.file).unlink(missing_ok=True)  # from an attempt that lacked answers
        for run in self._runs:
            self._take_kept(run)
        route: PromptLogprobs | str | None = None
        job = self._job
        async with Client(self._endpoint, job.concurrency, request_timeout_s=job.request_timeout_s) as client:
            self._model.context_length = await client.context_length() or job.context_length
            if any(run.loaded.asks_logprobs for run in self._runs):
                ids = self._model.tok_encode("one two three four five six seven eight")[: _PROBE_TOKENS + 1]
                route = await find_route(client, ids)
                if isinstance(route, str):
                    for run in self._runs:
                        if run.loaded.asks_logprobs:
                            run.note = f"the server gives no log-probabilities of prompts ({route})"
                else:
                    self._model.route = route
            await self._ask_all(client)
        found = self._scores(None if route is None or isinstance(route, str) else route.name)
        EVAL.write(Path(self._endpoint.directory), found)
        return found

    def _take_kept(self, run: _TaskRun) -> None:
        keys = {document.doc_id: document.key for document in run.loaded.documents}
        for sample in read_samples(Path(self._endpoint.directory) / run.loaded.name):
            if keys.get(sample.doc_id) == sample.key:
                run.kept[sample.doc_id] = run.samples[sample.doc_id] = sample
                run.running.add(sample)

    async def _ask_all(self, client: Client) -> None:
        for run in self._runs:
            self._report(run)
        work = self._work()
        workers = [asyncio.create_task(self._worker(client, work)) for _ in range(self._job.concurrency)]
        try:
            await asyncio.gather(*workers)
        except ServerGone as error:
            done = sum(len(run.samples) for run in self._runs)
            total = sum(len(run.loaded.documents) for run in self._runs)
            raise ServerGone(f"{error}; {done} of {counted(total, 'sample')} answered") from error
        finally:
            for worker in workers:
                worker.cancel()

    def _work(self) -> Iterator[tuple[_TaskRun, _Asking, int]]:
        """All unanswered requests, in the order of tasks and documents."""
        for run in self._runs:
            if run.note is not None:
                continue
            for document in run.loaded.documents:
                if document.doc_id in run.samples:
                    continue
                count = sum(instance.repeats or 1 for instance in document.instances)
                asking = _Asking(document, [None] * count)
                for place in range(count):
                    yield run, asking, place

    async def _worker(self, client: Client, work: Iterator[tuple[_TaskRun, _Asking, int]]) -> None:
        for run, asking, place in work:
            if asking.refusal is not None:
                asking.answers[place] = asking.refusal  # one of the sample's requests was refused, so it gets no answer
            else:
                instance, repeat = _instance_at(asking.document, place)
                found = await self._model.answer(client, instance, repeat)
                asking.answers[place] = of_arm(run.loaded, instance, found)
            if asking.is_over:
                self._end(run, asking)

    def _end(self, run: _TaskRun, asking: _Asking) -> None:
        document = asking.document
        if document.doc_id in run.samples or document.doc_id in run.refusals:
            return
        if (answers := asking.complete) is not None:
            sample = self._sample(run, document, answers)
            run.samples[document.doc_id] = sample
            run.running.add(sample)
            run.writer.add(sample)
        elif asking.refusal is not None:
            run.refusals[document.doc_id] = asking.refusal.reason
        self._report(run)

    def _sample(self, run: _TaskRun, document: TaskDocument, answers: tuple[SampleRequest, ...]) -> Sample:
        try:
            (judged,) = scoring.judge(run.loaded.task, [document], [answers])
        except Exception as error:  # raised by the task's code
            logger.exception("task %s, sample %s", run.loaded.name, document.doc_id)
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            run.unjudged = run.unjudged or f"sample {document.doc_id} can't be judged ({reason}); see samples.jsonl"
            judged = ()
        return _line(run.loaded, document, answers, judged)

    def _report(self, run: _TaskRun) -> None:
        interval = run.running.interval
        self._tell(
            EvalProgress(
                topology=self._endpoint.topology,
                task=run.loaded.name,
                done=run.done,
                answered=len(run.samples),
                total=len(run.loaded.documents),
                kept=len(run.kept),
                metric=run.running.metric,
                score=None if interval is None else interval.estimate,
                low=None if interval is None else interval.low,
                high=None if interval is None else interval.high,
            )
        )

    def _scores(self, route: str | None) -> TopologyScores:
        from importlib.metadata import version

        by_name: dict[str, ScoredTask] = {}
        samples: dict[str, Sequence[Sample]] = {}
        for run in self._runs:
            ordered = self._judged_together(run)
            run.writer.replace(ordered)
            by_name[run.loaded.name] = _scored(run, ordered, self._endpoint.model)
            samples[run.loaded.name] = ordered
        groups = [scoring.group_scores(group, by_name, samples) for group in self._loaded.groups]
        return TopologyScores(
            topology=self._endpoint.topology,
            lm_eval=version("lm-eval"),
            endpoint_type=self._job.endpoint_type,
            prompt_logprobs=route,
            limit=self._job.limit,
            tasks=(*by_name.values(), *(group for group in groups if group is not None)),
            arm_differences=structured.arm_differences(tuple(by_name.values()), samples),
        )

    def _judged_together(self, run: _TaskRun) -> list[Sample]:
        """Judges all samples of a task together, as lm-eval does, including those of an earlier attempt."""
        answered = [document for document in run.loaded.documents if document.doc_id in run.samples]
        if not answered:
            return []
        asked = [run.samples[document.doc_id].requests for document in answered]
        try:
            judged = scoring.judge(run.loaded.task, answered, asked)
        except Exception as error:  # raised by the task's code; the sample concerned was reported when it was answered
            logger.exception("task %s", run.loaded.name)
            run.unjudged = run.unjudged or f"its samples can't be judged ({type(error).__name__}: {error})"
            return [run.samples[document.doc_id] for document in answered]
        return [
            _line(run.loaded, document, answers, one)
            for document, answers, one in zip(answered, asked, judged, strict=True)
        ]


def _instance_at(document: TaskDocument, place: int) -> tuple[Instance, int]:
    """The instance for an index into a document's answers, and which of its repeats it is."""
    for instance in document.instances:
        count = instance.repeats or 1
        if place < count:
            return instance, place
        place -= count
    raise IndexError(place)


def _line(
    loaded: LoadedTask, document: TaskDocument, answers: tuple[SampleRequest, ...], judged: tuple[Judged, ...]
) -> Sample:
    return Sample(
        task=loaded.name,
        doc_id=document.doc_id,
        key=document.key,
        doc={str(name): scoring.plain(value) for name, value in document.doc.items()},
        target=scoring.plain(loaded.task.doc_to_target(document.doc)),
        requests=answers,
        judgements=judged if loaded.arm is None else structured.with_outcome(judged, answers, loaded.arm),
    )


def _scored(run: _TaskRun, ordered: list[Sample], model: str) -> ScoredTask:
    others = other_models(model, (one.models for sample in ordered for one in sample.requests))
    mixture = others.sentence if others is not None and others.are_several else None
    note = run.note or run.unjudged or _all_refused(ordered) or _silence(ordered) or mixture
    found: tuple[Score, ...] = ()
    if ordered and note is None:
        try:
            found = scoring.scores(run.loaded.task, ordered)
        except scoring.NoNumber as error:
            note = str(error)
    refused = {sample.doc_id: reason for sample in ordered if (reason := _refusal(sample)) is not None}
    return ScoredTask(
        task=run.loaded.name,
        output_type=str(run.loaded.task.OUTPUT_TYPE),
        version=version_of(run.loaded.task),
        num_fewshot=run.loaded.task.get_config("num_fewshot") or 0,
        samples=len(run.loaded.documents),
        answered=len(ordered),
        scores=found,
        unanswered=_by_reason(run.refusals),
        note=note,
        retrievals=needle.retrievals([one.doc for one in run.loaded.documents], ordered) if _is_needle(run) else (),
        doubts=() if others is None or others.are_several else (others.sentence,),
        grading=scoring.grading(run.loaded.task, run.loaded.documents),
        arm=run.loaded.arm,
        refused=_by_reason(refused),
    )


def _silence(samples: list[Sample]) -> str | None:
    """The reason not to score 0 if a server generated no text in any answer."""
    texts = [
        one.text
        for sample in samples
        for one in sample.requests
        if one.request == "generate_until" and one.refusal is None
    ]
    if len(texts) < 2 or any(texts):
        return None
    return f"all {len(texts)} answers are empty; expected text of some: see samples.jsonl, and ask the server for one"


def _is_needle(run: _TaskRun) -> bool:
    return run.loaded.name == needle.TASK and "depth" in run.loaded.documents[0].doc


def _by_reason(refusals: Mapping[int, str]) -> tuple[Unanswered, ...]:
    """The reasons by their count. ``refusals``: reason by doc_id."""
    return tuple(
        Unanswered(reason, count, min(doc_id for doc_id, refusal in refusals.items() if refusal == reason))
        for reason, count in Counter(refusals.values()).most_common()
    )


def _refusal(sample: Sample) -> str | None:
    return next((one.refusal for one in sample.requests if one.refusal is not None), None)


def _all_refused(samples: list[Sample]) -> str | None:
    """The reason not to score 0 if a server refused every schema, for example because it has no guided decoding."""
    reasons = [_refusal(sample) for sample in samples]
    if not reasons or None in reasons:
        return None
    return f"the server refused the schema of each of {counted(len(reasons), 'sample')}, first: {reasons[0]}"
