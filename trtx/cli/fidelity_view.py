"""The progress view of ``trtx eval fidelity``: that of ``trtx eval``, preceded by the reference."""

from __future__ import annotations

from trtx.cli.eval_view import EvalView


class FidelityView(EvalView):
    """Shows the progress of one run. A context manager."""

    def _on_topology(self, label: str) -> None:
        if label == "reference":
            self.say("reference: the embedded engine loads the checkpoint")
        else:
            super()._on_topology(label)
