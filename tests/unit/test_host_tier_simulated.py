"""The host tier at the proportions of a GPU: the benchmark's simulation, with the real scheduler and block pools."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_returning_conversations_find_their_prompts_and_nothing_is_dropped() -> None:
    command = [sys.executable, "benchmarks/host_tier_simulated.py", "--requests", "24", "--ways", "tier,all"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    reused = {way: float(share) for way, share in re.findall(r"^ *(tier|all) .* ([\d.]+)%$", printed, re.MULTILINE)}
    assert reused["tier"] >= reused["all"], printed
    assert re.search(r"[1-9]\d* loaded, 0 dropped", printed), printed
