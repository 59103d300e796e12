"""What the scores of a run are judged to be: against least scores, and against the same samples of a baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtx.bench.intervals import CONFIDENCE, per_interval
from trtx.bench.judgement import Judgement, Verdict, outcome
from trtx.errors import UsageError
from trtx.evals import Score, ScoredTask, TopologyScores, eval_directory, read_eval
from trtx.evals.forms import read_samples
from trtx.evals.gate import Value, by_key, cell_of, judge_answers, judge_difference, judge_min_score
from trtx.experiment.evaluation_spec import EvaluationSpec, read_evaluation
from trtx.report.forms import LOCK, VERDICT, AskedOf, ComparedWith, RunVerdict


@dataclass(frozen=True, slots=True)
class ScoredBaseline:
    """A run that others are compared with, sample by sample."""

    run_dir: Path
    scores: dict[str, TopologyScores]  # by topology

    def of(self, label: str) -> TopologyScores:
        """The same topology, or the first that was scored where there is none."""
        return self.scores.get(label) or next(iter(self.scores.values()))


def read_scored_baseline(path: Path) -> ScoredBaseline:
    """Raises UsageError where ``path`` is no run of ``trtx eval``, or has no score."""
    spec = read_evaluation(path)
    found = {label: scores for label in spec.labels if (scores := read_eval(path, label)) is not None}
    if not found:
        raise UsageError(f"{path} has no scores; expected a run that was scored; go on with it by trtx eval --resume")
    return ScoredBaseline(path, found)


def judge_evaluation(run_dir: Path, spec: EvaluationSpec) -> RunVerdict:
    """Judges every topology that was to be scored, writes ``verdict.json`` and returns it."""
    baseline = None if spec.baseline is None else read_scored_baseline(Path(spec.baseline))
    judgements: list[Judgement] = []
    for label in spec.labels:
        scores = read_eval(run_dir, label)
        if scores is None:
            judgements.append(
                Judgement(
                    cell=label, criterion="scored", verdict=Verdict.FAILED, reason="it was not scored; see the journal"
                )
            )
            continue
        judgements += [judge_answers(label, task) for task in scores.tasks if not task.subtasks]
        judgements += [judge_min_score(scores, least) for least in spec.least_scores]
        if baseline is not None:
            judgements += _differences(run_dir, scores, baseline, spec.max_drop)
    verdict = _run_verdict(judgements, None if baseline is None else _compared(run_dir, spec, baseline))
    VERDICT.write(run_dir, verdict)
    return verdict


def _differences(
    run_dir: Path, scores: TopologyScores, baseline: ScoredBaseline, max_drop: float
) -> Iterator[Judgement]:
    """Of the first metric of each task that is in no group, and of each group over the samples of its tasks."""
    before = baseline.of(scores.topology)
    compared = [task for task in _outermost(scores.tasks) if task.scores]
    confidence = per_interval(CONFIDENCE, max(1, len(compared)))
    for task in compared:
        score = task.scores[0]
        if before.lm_eval != scores.lm_eval:
            yield Judgement(
                cell=cell_of(scores.topology, task.task),
                criterion=f"{score.name}:drop:le:{max_drop:.10g}",
                verdict=Verdict.NO_VERDICT,
                reason=f"the baseline was scored by lm-eval {before.lm_eval}, and this run by {scores.lm_eval}; score "
                "both by the same",
            )
            continue
        names = task.subtasks or (task.task,)
        yield judge_difference(
            scores.topology,
            score,
            task.task,
            _values(eval_directory(run_dir, scores.topology), names, score),
            _values(eval_directory(baseline.run_dir, before.topology), names, score),
            f"{before.topology} of the baseline",
            max_drop,
            confidence,
        )


def _outermost(tasks: Sequence[ScoredTask]) -> list[ScoredTask]:
    inner = {name for task in tasks for name in task.subtasks}
    return [task for task in tasks if task.task not in inner]


def _values(directory: Path, tasks: Sequence[str], score: Score) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for task in tasks:
        found |= {f"{task}/{key}": value for key, value in by_key(read_samples(directory / task), score).items()}
    return found


def _run_verdict(judgements: Sequence[Judgement], baseline: ComparedWith | None) -> RunVerdict:
    error = outcome(judgements)
    worst = next((verdict for verdict in Verdict if any(one.verdict is verdict for one in judgements)), None)
    return RunVerdict(
        verdict=worst or Verdict.NO_VERDICT,
        exit_code=0 if error is None else error.exit_code,
        sentence=None if error is None else str(error),
        baseline=baseline,
        judgements=tuple(judgements),
    )


def _compared(run_dir: Path, spec: EvaluationSpec, baseline: ScoredBaseline) -> ComparedWith:
    before = read_evaluation(baseline.run_dir)
    started = LOCK.read(baseline.run_dir, AskedOf).provenance.environment.started_at
    asked = [name for name in ("endpoint_type", "limit", "num_fewshot") if getattr(before, name) != getattr(spec, name)]
    told = tuple(f"{name} was {getattr(before, name)} and is {getattr(spec, name)}" for name in asked)
    return ComparedWith(baseline.run_dir.name, baseline.run_dir.name, started, told, ())
