"""Parity: sends the same prompts through several routes of one model and compares their answers with the reference's.

This package owns the prompts, the client that sends and cancels requests, the distance of two answers, and its
judgement. It doesn't serve, kill workers or count events on a route (``experiment`` does), draw (``report``) or print
(``cli``).

Use :func:`make_prompts`, :func:`ask_all`, :func:`compare_route` and :func:`judge_route`. For an attached server,
:func:`find_server` probes its capabilities.

Invariants: answers are compared only at positions with equal preceding tokens, and a route passes only if counters
prove that it was used.
"""

from trtx.evals.parity.asking import Pass, Server, ask_all
from trtx.evals.parity.comparison import compare_route
from trtx.evals.parity.distance import Distance, distance
from trtx.evals.parity.forms import (
    PARITY,
    ComparedRoute,
    Parity,
    ParityAnswer,
    Prompt,
    Tolerance,
    has_answers,
    parity_directory,
    read_answers,
    read_parity,
    read_prompts,
    write_answers,
    write_prompts,
)
from trtx.evals.parity.gate import judge_route
from trtx.evals.parity.probing import find_server
from trtx.evals.parity.prompts import RequestShape, make_prompts, ordinary_ids

__all__ = [
    "PARITY",
    "ComparedRoute",
    "Distance",
    "Parity",
    "ParityAnswer",
    "Pass",
    "Prompt",
    "RequestShape",
    "Server",
    "Tolerance",
    "ask_all",
    "compare_route",
    "distance",
    "find_server",
    "has_answers",
    "judge_route",
    "make_prompts",
    "ordinary_ids",
    "parity_directory",
    "read_answers",
    "read_parity",
    "read_prompts",
    "write_answers",
    "write_prompts",
]
