"""Fidelity: the token-by-token divergence of a served engine from the embedded engine in the checkpoint's own
precision.

This package owns the reference (greedy text of the embedded engine with log-probabilities), the served engine's
log-probabilities of the same tokens, the estimate of the divergence, the documents under ``fidelity/``, and the
judgement of its metrics. It doesn't serve or create run directories (``experiment`` does), draw (``report``) or print
(``cli``).

Use ``make_reference`` of ``reference`` and ``ask_served`` of ``asking``, which import an engine and a client, and
:func:`judge_fidelity`. Reading stored results imports neither.

Invariants: a reported divergence never exceeds the true one. Every metric is shown with its basis. Tokens of one prompt
are never treated as independent.
"""

from trtx.evals.fidelity.forms import FIDELITY, TopologyFidelity, fidelity_directory, read_fidelity
from trtx.evals.fidelity.gate import judge_fidelity

__all__ = ["FIDELITY", "TopologyFidelity", "fidelity_directory", "judge_fidelity", "read_fidelity"]
