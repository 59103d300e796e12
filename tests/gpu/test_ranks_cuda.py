"""Ranks on two GPUs: the same tokens as one GPU, with CUDA graphs, through shared memory and through NCCL. The same
after a sleep of both, and above host memory of both.

Each case runs in processes of its own, which print Python's stacks and end if they take too long.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
HERE = Path(__file__).parent
LIMIT_S = 120
# Every Python process below imports it: the other rank's stacks are those that matter in a hang.
SITE = f"""
import faulthandler
faulthandler.dump_traceback_later({LIMIT_S}, exit=True)
"""


@pytest.mark.parametrize(
    ("model", "expert_ranks", "reads_peers", "drafts"),
    [
        ("synthetic:tiny", 1, True, "-"),
        ("synthetic:tiny", 1, False, "-"),
        ("synthetic:tiny-moe", 1, True, "-"),
        ("synthetic:tiny-moe", 2, True, "-"),
        ("synthetic:tiny-moe", 2, False, "-"),
        ("synthetic:tiny-trained", 1, True, "Draft_Target=synthetic:tiny-draft"),
        ("synthetic:tiny-trained", 1, True, "Eagle3=synthetic:tiny-eagle3"),
    ],
)
def test_two_gpus_give_the_tokens_of_one(
    model: str, expert_ranks: int, reads_peers: bool, drafts: str, tmp_path: Path
) -> None:
    gives_equal_tokens(tmp_path, "ranks_beside_one.py", model, str(expert_ranks), str(int(reads_peers)), drafts)


@pytest.mark.parametrize("reads_peers", [True, False])
@pytest.mark.parametrize("stage", ["sleep", "tier"])
def test_the_memory_of_two_gpus_goes_and_comes_back_together(stage: str, reads_peers: bool, tmp_path: Path) -> None:
    gives_equal_tokens(tmp_path, "ranks_memory.py", stage, str(int(reads_peers)), str(tmp_path))


def gives_equal_tokens(tmp_path: Path, name: str, *arguments: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    paths = [str(tmp_path), str(HERE.parents[1]), str(HERE.parent / "unit" / "torch_engine" / "runner")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    script = [sys.executable, "-u", str(HERE / name), *arguments]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=LIMIT_S + 30, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-8000:]}"
    assert "two closed" in done.stdout
