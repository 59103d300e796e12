"""The memory plan on screen: in --dry-run, in build --check, and in plan.json."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from trtx.checkpoint import resolve_checkpoint
from trtx.cli.memory_text import describe_memory
from trtx.memory import MemoryDevice, device_named, plan_memory

pytestmark = pytest.mark.slow


def _trtx(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trtx", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_table_fits_80_columns_with_the_largest_figures() -> None:
    path = resolve_checkpoint("synthetic:llama-3.1-8b").path
    values = {"max_batch_size": 2048, "tensor_parallel_size": 8, "cache_transceiver_config": {"backend": "DEFAULT"}}
    plan = plan_memory(path, "decode", values, engine="tensorrt-llm", device=device_named("B300"))
    lines = list(describe_memory([plan]))
    assert max(map(len, lines)) <= 80
    assert "holds" in "\n".join(lines)
    assert any(line.split()[:2] == ["a", "token"] and "16,384 B" in line for line in lines)


def test_the_plan_of_ranks_on_a_cpu_is_for_one_rank() -> None:
    host = MemoryDevice("CPU", 4 << 30, 4 << 30, is_gpu=False)
    path = resolve_checkpoint("synthetic:tiny-moe").path
    sizes = {"tensor_parallel_size": 2, "moe_expert_parallel_size": 2}
    one, two = (plan_memory(path, "agg", values, engine="torch", device=host) for values in ({}, sizes))
    assert next(describe_memory([one])) == "Memory of agg, host memory, 4.00 GiB for a worker:"
    assert next(describe_memory([two])) == "Memory of agg, host memory, 4.00 GiB for each of a worker's 2 ranks:"
    assert two.weight_bytes < one.weight_bytes


def test_dry_run_prints_the_plan_and_refuses_what_cannot_fit() -> None:
    done = _trtx("serve", "--dry-run", "--port", "0", "--engine", "torch", "--model", "synthetic:tiny-trained")
    assert done.returncode == 0, done.stderr
    assert "Memory of agg, host memory" in done.stdout
    assert "65,536  tokens, 2,048 blocks of 32" in done.stdout
    done = _trtx("serve", "--dry-run", "--port", "0", "--set", "kv_cache_config.max_tokens=10000000000")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "what would fit: --set kv_cache_config.max_tokens=" in done.stderr


def test_check_plans_for_a_gpu_that_is_not_here() -> None:
    done = _trtx("build", "synthetic:qwen3-8b", "--check", "--gpu", "H100", "--mode", "agg", "--json")
    assert done.returncode == 0, done.stderr
    (plan,) = json.loads(done.stdout)[0]["memory"]
    assert plan["kv_bytes_per_token"] == 147456
    assert plan["capacity_blocks"] == plan["pool_bytes"] // (147456 * plan["tokens_per_block"])
