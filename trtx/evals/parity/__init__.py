"""Parity: the same prompts through several routes of one model, and how far their answers are from the reference's.

Owns the prompts, the client that sends them and cancels some, the distance of two answers, and its judgement. Does not
serve, kill or count what happened on a route (``experiment`` does), draw (``report``) or print (``cli``).
Enter through :func:`make_prompts`, :func:`ask_all`, :func:`compare_route` and :func:`judge_route`; of a server that
somebody else started, :func:`find_server` says what it takes.
Always holds: answers are compared only where they had the same tokens before them, and a route passes only if somebody
counted that what it is called after has happened.
"""

from trtx.evals.parity.asking import Pass, Server, ask_all
from trtx.evals.parity.comparison import compare_route
from trtx.evals.parity.distance import Distance, distance
from trtx.evals.parity.forms import (
    PARITY,
    Answer,
    ComparedRoute,
    Parity,
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
from trtx.evals.parity.prompts import Shape, make_prompts, ordinary_ids

__all__ = [
    "PARITY",
    "Answer",
    "ComparedRoute",
    "Distance",
    "Parity",
    "Pass",
    "Prompt",
    "Server",
    "Shape",
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
