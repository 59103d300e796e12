"""Speed and scores of each topology side by side: whether it is faster, and whether it is still accurate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trtx.bench.metrics import output_token_throughput_per_device
from trtx.report.columns import MISSING, number
from trtx.report.scores import ScoreLine, Scores
from trtx.report.tables import table_cell
from trtx.report.view import Row, RunView


@dataclass(frozen=True, slots=True)
class SpeedAndQuality:
    """Speed and scores of one topology."""

    topology: str
    throughput: str  # the maximum over its cells without failures
    throughput_at: str  # the cell with this throughput; "" if there is none
    scores: tuple[ScoreLine | None, ...]  # the first metric of each task; None: not scored for that task

    @property
    def throughput_text(self) -> str:
        return f"{self.throughput} at {self.throughput_at}" if self.throughput_at else self.throughput


def throughput_title(view: RunView) -> str:
    return output_token_throughput_per_device.title.format(device=view.device)


def speed_and_quality(view: RunView) -> tuple[SpeedAndQuality, ...]:
    """Speed and scores of each topology; empty for a run without scoring."""
    return () if view.scores is None else tuple(_of_topologies(view, view.scores))


def _of_topologies(view: RunView, scores: Scores) -> Iterator[SpeedAndQuality]:
    for label in view.labels:
        rates = [
            (rate, row)
            for row in view.rows
            if row.topology == label and row.can_be_best and (rate := row.value(output_token_throughput_per_device))
        ]
        most, at = max(rates, key=lambda pair: pair[0], default=(None, None))
        yield SpeedAndQuality(
            label,
            MISSING if most is None else number(most),
            "" if at is None else _load(view, at),
            tuple(scores.first(label, task) for task in scores.tasks),
        )


def _load(view: RunView, row: Row) -> str:
    lengths = f" {row.lengths_text}" if view.has_several_lengths else ""
    return f"{row.load_text}{lengths}"


def scores_markdown(view: RunView) -> list[str]:
    """Lines of the section on scores; empty for a run without scoring."""
    if view.scores is None:
        return []
    speed = {one.topology: one.throughput_text for one in speed_and_quality(view)}
    rows = [
        f"| {line.topology} | {speed.get(line.topology, MISSING)} | {table_cell(line.task.task)} | {line.metric} | "
        f"{line.value} | {line.interval} | {line.chance} | {line.answered} |"
        for line in view.scores.lines
    ]
    return [
        "",
        "## Scores",
        "",
        f"| topology | most {throughput_title(view)} | task | metric | score | 95 % interval | chance | answered |",
        "|---|--:|---|---|--:|--:|--:|--:|",
        *rows,
    ]
