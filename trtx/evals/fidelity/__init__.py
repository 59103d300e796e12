"""Fidelity: how far a served engine is from the embedded engine in the checkpoint's own precision, token by token.

Owns the reference (greedy text of the embedded engine, and its log-probabilities), what the served engine says of the
same tokens, the estimate of the divergence, its documents under ``fidelity/``, and the judgement of its figures.
Does not serve or make run directories (``experiment`` does), draw (``report``) or print (``cli``).
Enter through ``make_reference`` of ``reference`` and ``ask_served`` of ``asking``, which import an engine and a client,
and :func:`judge_fidelity`; whoever reads what was stored imports neither.
Always holds: a divergence that is shown is no larger than the true one, no figure stands without what it rests on, and
tokens of one prompt never count as independent.
"""

from trtx.evals.fidelity.forms import FIDELITY, TopologyFidelity, fidelity_directory, read_fidelity
from trtx.evals.fidelity.gate import judge_fidelity

__all__ = ["FIDELITY", "TopologyFidelity", "fidelity_directory", "judge_fidelity", "read_fidelity"]
