"""Scores: what a served topology answers to the tasks of lm-eval, sample by sample, with an interval on every score.

Owns the tasks that trtx ships, the process that lm-eval runs in, the documents under ``eval/``, and their judgement.
Does not serve or make run directories (``experiment`` does), draw (``report``) or print (``cli``). lm-eval and what it
needs are imported in ``session/`` alone, which is a process of its own.
Enter through :class:`Session` for asking, ``judge_scores`` for verdicts, and :func:`read_eval` for what was scored.
Always holds: an answer is on disk before it counts, no score stands without its interval, and what was not asked or not
answered has a sentence in place of a score.
"""

from trtx.evals.forms import EVAL, Retrieval, Score, ScoredTask, TopologyScores, eval_directory, read_eval
from trtx.evals.messages import Endpoint, Job
from trtx.evals.process import Session, marker

__all__ = [
    "EVAL",
    "Endpoint",
    "Job",
    "Retrieval",
    "Score",
    "ScoredTask",
    "Session",
    "TopologyScores",
    "eval_directory",
    "marker",
    "read_eval",
]
