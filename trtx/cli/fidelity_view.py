"""What ``trtx eval fidelity`` shows while it runs: as ``trtx eval``, and the reference before it."""

from __future__ import annotations

from trtx.cli.eval_view import EvalView


class FidelityView(EvalView):
    """Follows one run. A context manager."""

    def _on_topology(self, label: str) -> None:
        if label == "reference":
            self.say("reference: the embedded engine loads the checkpoint")
        else:
            super()._on_topology(label)
