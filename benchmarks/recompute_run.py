"""Recomputes every figure of a run from aiperf's records of its requests, and says where the run has another.

    python benchmarks/recompute_run.py RUN

A second implementation of docs/figures.md, docs/validity.md and docs/verdicts.md: it imports nothing of trtx (and of
others PyYAML and pandas alone), and reads ``cells/*/trial-*/profile_export.jsonl``. What it computes it holds against
all that the run says: ``cell.json``, ``summary.json``, ``summary.csv``, ``summary.parquet``, the table of
``summary.md`` and ``verdict.json``, numbers to 12 digits, ends of intervals to 9, and texts as they stand there. A
figure that it does not know is a mismatch too, and so is a trial that lies there and is in no cell. Exit code 1 where
there is any. What a *baseline* measured it has to take from ``baseline.json``; the levels of validity, and what workers
told of pictures, it does not judge.
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
    """Everything that can be computed of a run, held against what it says."""
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
