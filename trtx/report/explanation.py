"""Explanations as text for the console, and as fields for ``--json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from trtx.bench.explain import CellExplanation
from trtx.bench.stages import STAGES, RequestSplit, SplitPercentile

NO_CAUSE = "no cause of slowness stands out"


def explanation_text(one: CellExplanation) -> str:
    """The lines of one cell: its stages, the largest parts, and the causes."""
    if one.unknown is not None:
        return f"{one.cell}: {one.unknown}"
    lines = [f"{one.cell}: {len(one.splits)} requests"]
    lines += _table(one)
    lines += [f"  {sentence[0].upper()}{sentence[1:]}." for sentence in one.sentences]
    if not one.causes:
        lines.append(f"  {NO_CAUSE[0].upper()}{NO_CAUSE[1:]}.")
    return "\n".join(lines)


def explanation_fields(one: CellExplanation) -> dict[str, Any]:
    """One cell for ``--json``. ``requests`` counts those whose stages are known."""
    return {
        "cell": one.cell,
        "answered": one.answered,
        "requests": len(one.splits),
        "unknown": one.unknown,
        "ttft": [_split_fields(split) for split in one.ttft],
        "itl": [_split_fields(split) for split in one.itl],
        "parts": [asdict(part) for part in one.parts],
        "causes": [
            {
                "name": found.cause.name,
                "bound": found.cause.bound,
                "evidence": found.evidence,
                "advice": found.cause.advice,
                "sentence": found.sentence,
            }
            for found in one.causes
        ],
    }


def request_text(cell: str, split: RequestSplit) -> str:
    """The lines of one request."""
    record = split.record
    lines = [f"{record.request_id} of {cell}"]
    if split.gate_ms is not None:
        lines.append(f"  sent {split.gate_ms:.1f} ms after it was due")
    for metric, value, stages in (
        ("TTFT", record.time_to_first_token, split.ttft),
        ("ITL", record.inter_token_latency, split.itl),
    ):
        if value is not None and stages is not None:
            parts = ", ".join(f"{stage} {stages[stage]:.2f}" for stage in STAGES if stage in stages)
            lines.append(f"  {metric} {value:.2f} ms: {parts}")
    lines += [f"  on {row.worker}: {row.outcome}, {row.tokens or 0} tokens" for row in split.rows]
    return "\n".join(lines)


def request_fields(cell: str, split: RequestSplit) -> dict[str, Any]:
    """One request for ``--json``; times in ms."""
    record = split.record
    return {
        "cell": cell,
        "request": record.request_id,
        "gate_ms": split.gate_ms,
        "ttft_ms": record.time_to_first_token,
        "ttft": split.ttft,
        "itl_ms": record.inter_token_latency,
        "itl": split.itl,
        "workers": [row.worker for row in split.rows],
    }


def _split_fields(split: SplitPercentile) -> dict[str, Any]:
    stages: Mapping[str, float] = split.stages
    return {"percentile": split.percentile, "ms": split.value, "stages": dict(stages), "requests": split.requests}


def _table(one: CellExplanation) -> list[str]:
    columns = [*(("TTFT", split) for split in one.ttft), *(("ITL", split) for split in one.itl)]
    shown = [stage for stage in STAGES if any(stage in split.stages for _, split in columns)]
    heads = [f"{metric} p{split.percentile}" for metric, split in columns]
    lines = ["  " + f"{'ms':<14}" + "".join(f"{head:>12}" for head in heads)]
    for stage in shown:
        cells = (f"{split.stages[stage]:.2f}" if stage in split.stages else "–" for _, split in columns)
        lines.append("  " + f"{stage:<14}" + "".join(f"{text:>12}" for text in cells))
    totals = (f"{split.value:.2f}" for _, split in columns)
    return [*lines, "  " + f"{'together':<14}" + "".join(f"{text:>12}" for text in totals)]
