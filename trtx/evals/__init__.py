"""Scores of served topologies on lm-eval tasks, stored sample by sample, with a confidence interval for every score.

This package owns the tasks that trtx ships, lm-eval's process, the documents under ``eval/``, and their judgement. It
doesn't serve or create run directories (``experiment`` does), draw (``report``) or print (``cli``). Only ``session/``,
which runs as a separate process, imports lm-eval and its dependencies.

Use :class:`Session` to request answers, ``judge_scores`` for verdicts, and :func:`read_eval` for stored scores.

Invariants: an answer is on disk before it counts. Every score has an interval, or a sentence that says why not. A task
that was not asked, or not answered, has a sentence in place of a score.
"""

from trtx.evals.forms import EVAL, Retrieval, Score, ScoredTask, TopologyScores, eval_directory, read_eval
from trtx.evals.messages import Endpoint, EvalJob
from trtx.evals.process import Session, marker

__all__ = [
    "EVAL",
    "Endpoint",
    "EvalJob",
    "Retrieval",
    "Score",
    "ScoredTask",
    "Session",
    "TopologyScores",
    "eval_directory",
    "marker",
    "read_eval",
]
