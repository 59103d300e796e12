"""Planted slowness in real topologies: ``trtx explain`` names each cause, and none in runs without one."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from planted_slowness import (
    PACED,
    RANDOM,
    SLOW_PROCESSOR,
    TORCH,
    causes_of,
    lacks_slow_link,
    on_one_core,
    slow_link,
    slow_run,
    stopped_client,
    with_recorded_gpus,
)

pytestmark = pytest.mark.proof

FEW = ("--request-count", "40", "--warmup-request-count", "4", *RANDOM)
SHORT = ("--isl", "32", "--osl", "16")


@pytest.mark.parametrize(
    "load", [(*PACED, "--concurrency", "4", "--osl", "16"), (*TORCH, "--concurrency", "1", "--osl", "8")]
)
def test_a_slow_client(tmp_path: Path, load: Sequence[str]) -> None:
    run = slow_run(tmp_path / "runs", *load, "--isl", "32", *FEW, meddling=stopped_client(0.2, 0.03))

    assert [*causes_of(run).values()] == [["slow client"]]


@pytest.mark.parametrize(
    "load",
    [
        (*PACED, "--set", "max_batch_size=2", "--concurrency", "12"),
        (*TORCH, "--set", "kv_cache_config.max_tokens=256", "--concurrency", "8"),
    ],
)
def test_a_queue_for_slots_or_for_blocks(tmp_path: Path, load: Sequence[str]) -> None:
    run = slow_run(tmp_path / "runs", *load, "--isl", "64", "--osl", "16", *FEW)

    assert [*causes_of(run).values()] == [["queue"]]


@pytest.mark.parametrize("every", [8, 3])
def test_short_prompts_behind_long_ones(tmp_path: Path, every: int) -> None:
    prompts = tmp_path / "prompts.jsonl"
    words = ["rivers", "run", "to", "the", "sea", "and", "old", "hills", "shine", "under", "moon", "sun"]
    draw = random.Random(3)
    lines = [
        json.dumps({"text": " ".join(draw.choices(words, k=700 if number % every == 1 else 10))})
        for number in range(100)
    ]
    prompts.write_text("\n".join(lines) + "\n")

    run = slow_run(
        tmp_path / "runs", *TORCH, "--input-file", str(prompts), "--custom-dataset-type", "single_turn", "--osl", "4",
        "--concurrency", "4", "--request-count", "90", "--warmup-request-count", "8",
    )  # fmt: skip

    assert [*causes_of(run).values()] == [["head of line"]]


@pytest.mark.skipif(lacks_slow_link() is not None, reason=str(lacks_slow_link()))
@pytest.mark.parametrize(("mbit_s", "isl"), [(40, 512), (15, 256)])
def test_a_slow_handoff(tmp_path: Path, mbit_s: int, isl: int) -> None:
    run = slow_run(
        tmp_path / "runs", *TORCH, "--mode", "disagg", "--concurrency", "1", "--isl", str(isl), "--osl", "8",
        "--request-count", "20", "--warmup-request-count", "2", *RANDOM,
        through=slow_link(mbit_s), variables={"UCX_TLS": "tcp"},
    )  # fmt: skip

    assert [*causes_of(run).values()] == [["slow handoff"]]


@pytest.mark.parametrize("mode", ["agg", "disagg"])
def test_an_engine_whose_host_is_slow(tmp_path: Path, mode: str) -> None:
    variables = {"PYTHONPATH": str(SLOW_PROCESSOR), "SLOW_PROCESSOR_S": "0.04"}
    run = slow_run(tmp_path / "runs", *TORCH, "--mode", mode, "--concurrency", "2", *SHORT, *FEW, variables=variables)

    assert [*causes_of(run).values()] == [["host-bound engine"]]


@pytest.mark.parametrize(("mode", "worker"), [("agg", "agg-0"), ("disagg", "decode-0")])
def test_a_worker_on_one_core(tmp_path: Path, mode: str, worker: str) -> None:
    run = slow_run(
        tmp_path / "runs", *TORCH, "--mode", mode, "--concurrency", "8", "--isl", "32", "--osl", "64", *FEW,
        meddling=on_one_core("trtx.worker", f"--name {worker}"),
    )  # fmt: skip

    assert [*causes_of(run).values()] == [["worker on one core"]]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return slow_run(tmp_path_factory.mktemp("sound") / "runs", *PACED, "--concurrency", "1,2,4,8", *SHORT, *FEW)


# An H100 in a machine room that was too warm, and one whose power supply asked for less.
WARM = [
    {"sm_clock_mhz": mhz, "clock_reasons": why, "power_w": watts, "temperature_c": degrees}
    for mhz, why, watts, degrees in (
        (1980, [], 412.0, 71), (1545, ["thermal, by software"], 388.2, 87), (1410, ["thermal, by software"], 371.9, 88)
    )
]  # fmt: skip
BRAKED = [
    {"sm_clock_mhz": mhz, "clock_reasons": why, "power_w": watts, "temperature_c": 55}
    for mhz, why, watts in ((1980, ["power limit"], 699.1), (735, ["hardware slowdown", "power brake"], 281.4))
]


@pytest.mark.parametrize("readings", [WARM, BRAKED])
def test_a_throttled_gpu(sound: Path, tmp_path: Path, readings: list[dict[str, Any]]) -> None:
    gpus = [{"name": "GPU 0", "max_sm_clock_mhz": 1980, **one} for one in readings]
    run = with_recorded_gpus(sound, tmp_path / "run", gpus)

    assert [*causes_of(run).values()] == [["throttled GPU"]] * 4


def test_no_cause_where_an_engine_keeps_its_pace(sound: Path) -> None:
    assert [*causes_of(sound).values()] == [[]] * 4


@pytest.mark.parametrize(
    "topology",
    [
        (*PACED, "--mode", "disagg", "--concurrency", "1,2,4,8"),
        (*TORCH, "--concurrency", "1,2,3,4"),
        (*TORCH, "--mode", "disagg", "--concurrency", "1,2,3,4"),
        (*TORCH, "--workers", "2", "--router-mode", "kv", "--concurrency", "1,2,3,4"),
    ],
)
def test_no_cause_in_runs_without_one(tmp_path: Path, topology: Sequence[str]) -> None:
    run = slow_run(tmp_path / "runs", *topology, *SHORT, *FEW)

    assert [*causes_of(run).values()] == [[]] * 4
