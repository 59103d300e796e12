"""What a verb shows goes into a pipe whose reader ends first, as ``tee`` does on Ctrl-C: it stops as cleanly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from processes import TRTX
from topology_clients import PACED, nothing_left, wait_until

from trtx.launch.processes import members
from trtx.topology import Plan


def topology_of(run_parent: Path) -> Plan | None:
    """The plan that a verb wrote under ``run_parent``, once its frontend and its worker live."""
    for path in (*run_parent.glob("*/plan.json"), *run_parent.glob("*/agg/plan.json")):
        text = path.read_text()
        if '"processes"' in text and '"topologies"' not in text:
            plan = Plan.from_json(json.loads(text))
            return plan if len(members(plan.marker, ())) >= 2 else None
    return None


@pytest.mark.proof
@pytest.mark.parametrize("verb", ["serve", "bench"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_stops_cleanly_though_nobody_reads_any_more(tmp_path: Path, verb: str, number: int) -> None:
    arguments = [verb, *PACED, "--port", "0", "-o", str(tmp_path)]
    if verb == "bench":
        arguments += ["--model", "synthetic:tiny", "--concurrency", "1"]
    read_end, write_end = os.pipe()
    errors = tmp_path / "stderr.txt"
    with errors.open("wb") as stderr:
        shown = {"serve": {"stdout": write_end, "stderr": stderr}, "bench": {"stdout": stderr, "stderr": write_end}}
        process = subprocess.Popen([*TRTX, *arguments], stdin=subprocess.DEVNULL, **shown[verb])  # type: ignore[call-overload]
    os.close(write_end)
    try:
        wait_until(lambda: topology_of(tmp_path) is not None, 60, "frontend and worker started")
        plan = topology_of(tmp_path)
        assert plan is not None
        os.close(read_end)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        assert nothing_left(plan)
        assert "Traceback" not in errors.read_text()
    finally:
        if process.poll() is None:
            process.kill()  # its guardian ends the rest
            process.wait()
