"""Recomputes every metric of a run from its records and readings, and reports where the run has another value.

    python benchmarks/recompute_run.py RUN

It is a second implementation of docs/reference/metrics.md, docs/validity.md and docs/verdicts.md. It imports no trtx
code, and only PyYAML and pandas of other packages. It reads ``profile_export.jsonl`` (aiperf's requests) and
``readings.json`` (GPUs) of ``cells/*/trial-*``, and compares its results with all documents of the run: ``cell.json``,
``summary.json``, ``summary.csv``, ``summary.parquet``, the table of ``summary.md`` and ``verdict.json``. Numbers must
agree to 12 digits, the ends of intervals to 9, and texts exactly. An unknown metric is a mismatch too, and so is a
trial on disk that belongs to no cell. The exit code is 1 if there is any mismatch. The measurements of a *baseline* are
taken from ``baseline.json``. The levels of validity, and the workers' counters of images, are not checked.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml
from recomputed.cells import Comparison, check_cell
from recomputed.summaries import check_summaries
from recomputed.verdict import FILE, check_verdict


def check_run(run: Path) -> Comparison:
    """Compares everything that can be computed for a run with the run's documents."""
    comparison = Comparison(run)
    lock = yaml.safe_load((run / "run.lock.yaml").read_text(encoding="utf-8"))
    cells = {}
    for directory in sorted((run / "cells").glob("*")):
        if (directory / "cell.json").exists():
            cells[directory.name] = check_cell(comparison, directory, lock)
        else:
            comparison.mismatches.append((f"cells/{directory.name}", "cell.json", "not there", "a cell"))
    check_summaries(comparison, lock, cells)
    if (run / FILE).exists():
        check_verdict(comparison, lock, cells)
    return comparison


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory of trtx bench")
    run: Path = parser.parse_args(arguments).run
    if not (run / "run.lock.yaml").is_file():
        parser.error(f"{run} has no run.lock.yaml; expected a run directory of trtx bench")
    comparison = check_run(run)
    if comparison.mismatches:
        print(comparison.table())
    print(f"{comparison.compared:,} numbers and texts compared, {len(comparison.mismatches):,} mismatches")
    return 1 if comparison.mismatches else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
