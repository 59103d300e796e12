"""``trtx bench --resume`` whole: kill -9 in the middle of a sweep, then go on with real aiperf on the paced engine."""

from __future__ import annotations

import json
import signal
import subprocess
import xml.etree.ElementTree as ElementTree
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from called import Done, call
from processes import TRTX
from recomputed_run import assert_recomputed
from topology_clients import PACED, wait_until

# The second cell takes 4 s to measure: there is time to kill it in the middle.
LOAD = ["--concurrency", "2,1", "--request-count", "24", "--isl", "32", "--osl", "8"]
LOAD += ["--warmup-request-count", "4", "--prompt-corpus", "random"]  # which aiperf makes in less time


def files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }


def prompts(trial: Path) -> list[str]:
    document = json.loads((trial / "inputs.json").read_text())
    return [payload["messages"][0]["content"] for entry in document["data"] for payload in entry["payloads"]]


def has_text(directory: Path, name: str) -> bool:
    return (directory / name).exists() and (directory / name).stat().st_size > 0


def stop_what_measures(pid: int) -> None:
    """SIGSTOP for ``pid`` and all that it started but the guardian, which ends them once ``pid`` is dead."""
    bench = psutil.Process(pid)
    bench.suspend()
    for process in bench.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "trtx.launch.guardian" not in process.cmdline():
                process.suspend()


def resume(run_dir: Path, *arguments: str) -> Done:
    return call("bench", "--resume", str(run_dir), *arguments)


def test_a_killed_sweep_goes_on_with_the_cells_that_it_lacks(tmp_path: Path) -> None:
    bench = subprocess.Popen(
        [*TRTX, "bench", *PACED, "--model", "synthetic:tiny", *LOAD, "-o", str(tmp_path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: any(tmp_path.glob("*/cells/agg-c1/trial-01")), 120, "the first cell was measured")
        (run_dir,) = tmp_path.iterdir()
        second = run_dir / "cells" / "agg-c1" / "trial-01"
        # Before its first request. Records are written as the trial ends: whoever waits for them may come too late.
        wait_until(lambda: has_text(second, "inputs.json"), 120, "the second cell's prompts are written")
        stop_what_measures(bench.pid)  # or aiperf might be through before a slow machine has asked
        refused = resume(run_dir)
        assert refused.code == 2 and "another trtx measures" in refused.err
    finally:
        bench.send_signal(signal.SIGKILL)
        bench.wait()
    begun = prompts(second)
    ended = files(run_dir / "cells" / "agg-c2" / "trial-01")

    refused = resume(run_dir, "--isl", "64")
    assert refused.code == 2 and "--isl" in refused.err and "leave it out" in refused.err
    done = resume(run_dir, "--json")
    assert done.code == 0, done.err
    assert "kept: agg-c2\nto measure: agg-c1\n" in done.err
    rows: list[dict[str, Any]] = json.loads(done.out.splitlines()[-1])["rows"]
    assert [(row["concurrency"], row["status"], row["request_count"]) for row in rows] == [(1, "ok", 24), (2, "ok", 24)]
    assert files(run_dir / "cells" / "agg-c2" / "trial-01") == ended
    assert prompts(run_dir / "cells" / "agg-c1" / "trial-01") == begun
    assert prompts(run_dir / "attempts" / "1" / "cells" / "agg-c1" / "trial-01") == begun
    suite = ElementTree.parse(run_dir / "junit.xml").getroot()
    invalid = sum(row["validity"] == "INVALID" for row in rows)  # as on a machine with too much else to do
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("4", "0", str(invalid))
    assert "| Resumed |" in (run_dir / "summary.md").read_text()
    assert_recomputed(run_dir)

    before = files(run_dir / "cells")
    again = resume(run_dir)
    assert again.code == 0, again.err
    assert "to measure: nothing" in again.err
    assert files(run_dir / "cells") == before
    assert [path.name for path in (run_dir / "attempts").iterdir()] == ["1"]

    records = run_dir / "cells" / "agg-c2" / "trial-01" / "profile_export.jsonl"
    records.write_bytes(records.read_bytes().replace(b'"value":', b'"value": '))  # every figure is as it was
    damaged = call("report", str(run_dir))
    assert damaged.code == 2 and "records of agg-c2 have changed since the measurement" in damaged.err
    once_more = resume(run_dir)
    assert once_more.code == 0, once_more.err
    assert "measured again because their files have changed: agg-c2/trial-01/profile_export.jsonl has" in (
        once_more.err
    )
    assert prompts(run_dir / "attempts" / "2" / "cells" / "agg-c2" / "trial-01")
    mended = call("report", str(run_dir))
    assert mended.code == 0, mended.err
    assert "are unchanged since each trial ended" in (run_dir / "report.html").read_text()
