"""Table of image processing times by cell and role, from the workers' counters."""

from __future__ import annotations

from trtx.bench.image_counters import ImageCounts
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
HEADINGS = ("cell", "role", "images", "cache hits %", *(f"{name}, ms" for name in STAGES))
MEANING = (
    "Mean times, including waiting, from the workers' own counters. They start at about the first measured request of "
    "each trial. Fetch is the time for all images of a request; the other stages are per image. A cache hit is an "
    "image whose embedding the worker had, or was computing for another request. The time at an encode worker is that "
    "of the whole call, with preprocessing, encoding and the transfer in both directions."
)


def image_rows(view: RunView) -> tuple[tuple[str, ...], ...]:
    """One row of text per cell and role with image counters; empty for runs without images."""
    cells = [(row.name, (row.cell and row.cell.pictures) or {}) for row in view.rows if row.cell]
    if not view.has_images and not any(counts.looked_up for _, roles in cells for counts in roles.values()):
        return ()
    rows = []
    for name, roles in cells:
        rows += [(name, role, *_cells(counts)) for role, counts in roles.items()]
        rows += [] if roles else [(name, *[MISSING] * (len(HEADINGS) - 1))]
    return tuple(rows)


def _cells(counts: ImageCounts) -> tuple[str, ...]:
    values = (counts.hit_rate, *(counts.ms(stage) for stage in STAGES.values()))
    return (f"{counts.looked_up:,}", *(MISSING if value is None else number(value) for value in values))


def images_markdown(view: RunView) -> list[str]:
    rows = image_rows(view)
    return ["", "## Images", "", MEANING, "", *markdown_table(heads(*HEADINGS, text=("role",)), rows)] if rows else []
