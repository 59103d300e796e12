"""The verdict on a run of ``trtx eval``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trtx.bench.files import name_of
from trtx.bench.intact import refuse_changed_documents
from trtx.errors import UsageError
from trtx.evals.pairs import TopologyValues
from trtx.experiment.baselines.baseline import conditions_of_run
from trtx.experiment.baselines.conditions import differences, unchecked
from trtx.experiment.bench.verdict import run_verdict
from trtx.experiment.evaluation_spec import EvaluationSpec
from trtx.experiment.scores import judge_scores, partners, score_differences, scores_of_run, unjudged
from trtx.runs.forms import LOCK, VERDICT, AskedOf, ComparedWith, RunVerdict


def read_scored_baseline(path: Path) -> tuple[TopologyValues, ...]:
    """The scores of a run of ``trtx eval`` or ``trtx bench``. Raises UsageError if it has none."""
    if not (path / LOCK.file).exists():
        raise UsageError(f"{path} is not a run directory, because it has no {LOCK.file}; expected one of trtx eval")
    if not (found := scores_of_run(path)):
        raise UsageError(f"{path} has no scores; resume it with --resume, or choose another run")
    refuse_changed_documents(path)
    return found


def judge_evaluation(run_dir: Path, spec: EvaluationSpec) -> RunVerdict:
    """Judges every topology to be scored, writes ``verdict.json`` and returns the verdict."""
    baseline = None if spec.baseline is None else Path(spec.baseline)
    values = () if baseline is None else read_scored_baseline(baseline)
    others = partners(spec.labels, values)
    judgements = judge_scores(run_dir, spec.labels, spec, others, whose=" of the baseline")
    verdict = run_verdict((), judgements, None if baseline is None else _compared(run_dir, spec, baseline, values))
    VERDICT.write(run_dir, verdict)
    return verdict


def _compared(run_dir: Path, spec: EvaluationSpec, baseline: Path, values: Sequence[TopologyValues]) -> ComparedWith:
    started = LOCK.read(baseline, AskedOf).provenance.environment.started_at
    name = name_of(baseline)
    before, now = conditions_of_run(baseline), conditions_of_run(run_dir)
    found = map(str, differences(before, now))
    # before.eval is empty for a run of trtx bench that is older than this condition.
    asked = () if before.eval else score_differences(spec, values)
    dropped = unjudged(scores_of_run(run_dir), values)
    return ComparedWith(name, name, started, (*found, *asked, *dropped), unchecked(before, now))
