"""The progress view of ``trtx build`` on stderr (a bar on a terminal, else lines), and the table of the proof."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from trtx.cli.bars import BarsView

if TYPE_CHECKING:
    from trtx.build import BuildProgress as Built
    from trtx.build import Manifest

_SAYS = {
    "waiting": "waiting for another build of the same",
    "starting": "starting ModelOpt",
    "loading": "loading the model",
    "calibrating": "calibrating",
    "building": "building the TensorRT engine",
    "exporting": "exporting",
    "proving": "proving it against the source",
}


class BuildView(BarsView):
    """Shows the progress of one build. A context manager; call it with each progress record."""

    def __init__(self) -> None:
        super().__init__()
        self._bar = self._bars.add_task("", total=None)
        self._phase = ""

    def __call__(self, now: Built) -> None:
        if now.phase != self._phase:
            self._phase = now.phase
            self.say(_SAYS[now.phase])
        self._bars.update(self._bar, description=_SAYS[now.phase], completed=now.done, total=now.total or None)


def proof_table(manifest: Manifest) -> Table:
    """Returns a table that compares perplexity and sizes of source and result, in at most 80 columns."""
    table = Table(box=None, pad_edge=False)
    table.add_column(f"{manifest.source['name']}, {manifest.inputs['format']}")
    for title in ("source", "result", "change"):
        table.add_column(title, justify="right")
    proof, size = manifest.proof, manifest.weight_bytes
    if proof is not None:
        table.add_row(
            f"perplexity ({proof.tokens:,} held-out tokens)",
            f"{proof.source_perplexity:.4g}",
            f"{proof.perplexity:.4g}",
            f"{proof.increase_pct:+.2f} ±{proof.standard_error_pct:.2f} %",
        )
        table.add_row("greedy tokens equal up to a difference", "", f"{100 * proof.greedy_agreement:.1f} %", "")
        table.add_row("equal greedy continuations", "", f"{proof.identical} of {proof.prompts}", "")
    table.add_row(
        "weights, MiB",
        f"{size['source'] / 2**20:,.1f}",
        f"{size['result'] / 2**20:,.1f}",
        f"{100 * (size['result'] / size['source'] - 1):+.0f} %",
    )
    return table
