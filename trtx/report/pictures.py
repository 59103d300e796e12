"""Table of image processing times by cell and role, from the workers' counters."""

from __future__ import annotations

from trtx.bench.pictures import PictureCounts
from trtx.report.columns import MISSING, number
from trtx.report.tables import heads, markdown_table
from trtx.report.view import RunView

# Column heading -> the worker stage whose mean time it shows.
STAGES = {
    "fetch": "fetch",
    "preprocess": "prepare",
    "encode": "encode",
    "at an encode worker": "remote",
    "to the engine": "put",
}
HEADINGS = ("cell", "role", "pictures", "cache hits %", *(f"{name}, ms" for name in STAGES))
MEANING = (
    "Means from the workers' own counters, waiting included, each trial's from about its first measured request on: "
    "fetch of the pictures of a request together, the other stages of one picture. Cache hits: of the pictures that a "
    "role was asked for, those whose embedding it held or was making for another request. At an encode worker: the "
    "whole call, its preprocessing and encoding with the way there and back."
)


def picture_rows(view: RunView) -> tuple[tuple[str, ...], ...]:
    """One row of text per cell and role with image counters; empty for runs without images."""
    told = [(row.name, (row.cell and row.cell.pictures) or {}) for row in view.rows if row.cell]
    if not view.has_images and not any(counts.asked for _, roles in told for counts in roles.values()):
        return ()
    rows = []
    for name, roles in told:
        rows += [(name, role, *_cells(counts)) for role, counts in roles.items()]
        rows += [] if roles else [(name, *[MISSING] * (len(HEADINGS) - 1))]
    return tuple(rows)


def _cells(counts: PictureCounts) -> tuple[str, ...]:
    values = (counts.hit_rate, *(counts.ms(stage) for stage in STAGES.values()))
    return (f"{counts.asked:,}", *(MISSING if value is None else number(value) for value in values))


def pictures_markdown(view: RunView) -> list[str]:
    rows = picture_rows(view)
    return ["", "## Pictures", "", MEANING, "", *markdown_table(heads(*HEADINGS, text=("role",)), rows)] if rows else []
