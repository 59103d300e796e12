"""Table of KV handoffs from prefill to decode workers per cell, from the decode workers' counters."""

from __future__ import annotations

from collections.abc import Mapping

from trtx.bench.handoffs import HandoffCounts, HandoffsByPair, pair_text
from trtx.report.columns import MISSING, number
from trtx.report.tables import heads, markdown_table
from trtx.report.view import RunView

HANDOFF_HEADINGS = (
    "cell",
    "requests",
    "KV received",
    "in own cache",
    "recomputed",
    "local",
    "whole",
    "MiB",
    "ms per read",
    "worst pair",
)
HANDOFF_MEANING = (
    "From the decode workers' own counters, which start at about the first measured request of each trial. KV "
    "received: KV arrived from a prefill worker. In own cache: the decode worker had the KV already. Recomputed: KV "
    "did not arrive, so the decode worker computed the prompt again. Local: the router left the prompt to the decode "
    "worker (--conditional-disagg). Whole: no prefill worker had the request, though one should have had it."
)


def handoff_rows(view: RunView) -> tuple[tuple[str, ...], ...]:
    """One row of text per cell of a topology with decode workers; empty for runs without any."""
    cells = [(row.name, row.cell.handoffs) for row in view.rows if row.cell]
    return tuple((name, *_cells(pairs)) for name, pairs in cells if pairs)


def _cells(by_decode: HandoffsByPair) -> tuple[str, ...]:
    pairs = {pair_text(decode, prefill): one for decode, found in by_decode.items() for prefill, one in found.items()}
    total = sum(pairs.values(), HandoffCounts())
    if total.unknown:
        return (f"{total.requests:,}", *[MISSING] * 3, f"{total.local:,}", f"{total.whole:,}", *[MISSING] * 3)
    counts = (total.requests, total.read, total.nothing, total.recomputed, total.local, total.whole)
    read_ms = number(1000 * total.seconds / total.read) if total.read else MISSING
    return (*(f"{one:,}" for one in counts), number(total.bytes / 2**20), read_ms, _worst(pairs))


def _worst(pairs: Mapping[str, HandoffCounts]) -> str:
    name = max(pairs, key=lambda one: pairs[one].lost)
    return f"{name}: {pairs[name].lost:,}" if pairs[name].lost else MISSING


def handoffs_markdown(view: RunView) -> list[str]:
    rows = handoff_rows(view)
    columns = heads(*HANDOFF_HEADINGS, text=("worst pair",))
    return ["", "## Handoffs", "", HANDOFF_MEANING, "", *markdown_table(columns, rows)] if rows else []
