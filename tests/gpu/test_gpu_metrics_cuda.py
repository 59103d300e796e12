"""A worker's GPU metrics on a real GPU, and an engine's count of forwards without a CUDA graph."""

from __future__ import annotations

import os
from pathlib import Path

import pynvml
import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from runner_player import Player, random_prompt

from trtx.torch_engine.runner import RunnerArgs, create_runner
from trtx.worker.gpu_metrics import GpuMetrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

ALWAYS = {
    "trtx_gpu_sm_clock_hertz",
    "trtx_gpu_memory_used_bytes",
    "trtx_gpu_memory_total_bytes",
    "trtx_gpu_temperature_celsius",
}
"""What NVML gives for each data centre GPU, in a container too."""


@pytest.fixture
def uuid(monkeypatch: pytest.MonkeyPatch) -> str:
    """The UUID of the first visible GPU, as the launcher passes it to a worker."""
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", uuid)
    return uuid


def scraped(metrics: GpuMetrics) -> dict[str, list[tuple[dict[str, str], float]]]:
    registry = CollectorRegistry()
    registry.register(metrics)  # type: ignore[arg-type]
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def test_readings_are_plausible_and_are_of_this_gpu(uuid: str) -> None:
    found = scraped(GpuMetrics())
    assert found.keys() >= ALWAYS
    assert {labels["uuid"] for samples in found.values() for labels, _ in samples} == {uuid}
    ((_, total),) = found["trtx_gpu_memory_total_bytes"]
    assert abs(total / torch.cuda.get_device_properties(0).total_memory - 1) < 0.1
    ((_, clock),) = found["trtx_gpu_sm_clock_hertz"]
    assert 1e8 < clock < 4e9
    if "trtx_gpu_power_watts" in found:
        ((_, power),) = found["trtx_gpu_power_watts"]
        assert 10 < power < 2000
    for labels, value in found.get("trtx_gpu_clock_reason", []):
        assert value in (0, 1), labels


def test_work_shows_in_memory_and_energy(uuid: str) -> None:
    metrics = GpuMetrics()
    before = scraped(metrics)
    held = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    square = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(500):
        square = torch.nn.functional.normalize(square @ square)
    torch.cuda.synchronize()
    after = scraped(metrics)
    ((_, least),), ((_, most),) = before["trtx_gpu_memory_used_bytes"], after["trtx_gpu_memory_used_bytes"]
    assert most - least >= held.numel() * 0.9
    if "trtx_gpu_energy_joules_total" in before:
        ((_, first),), ((_, last),) = before["trtx_gpu_energy_joules_total"], after["trtx_gpu_energy_joules_total"]
        assert last > first


def test_nvml_says_no_more_than_is_served(uuid: str) -> None:
    """A reading that NVML gives has a sample, so an absent one was refused."""
    found = scraped(GpuMetrics())
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(os.environ["CUDA_VISIBLE_DEVICES"])
    for function, family in (
        (pynvml.nvmlDeviceGetPowerUsage, "trtx_gpu_power_watts"),
        (pynvml.nvmlDeviceGetTotalEnergyConsumption, "trtx_gpu_energy_joules_total"),
        (pynvml.nvmlDeviceGetUtilizationRates, "trtx_gpu_utilization_ratio"),
        (pynvml.nvmlDeviceGetCurrentClocksEventReasons, "trtx_gpu_clock_reason"),
    ):
        try:
            function(handle)
        except pynvml.NVMLError:
            assert family not in found
        else:
            assert family in found


def test_a_decode_batch_beyond_the_largest_graph_is_a_miss(checkpoint: Path) -> None:
    sizes = {"tokens_per_block": 8, "num_blocks": 64, "max_batch_size": 4}
    runner = create_runner(
        RunnerArgs(model_dir=checkpoint, device="cuda", dtype="float32", cuda_graph_batch_sizes=(1,), **sizes)
    )
    player = Player(runner)
    first, second = (player.add(random_prompt(9, seed)) for seed in (1, 2))
    player.step([first, second])
    before = runner.graph_misses
    assert before is not None
    player.step([first])
    assert runner.graph_misses == before, "one decode fits the graph of one"
    player.step([first, second])
    assert runner.graph_misses == before + 1
    runner.close()


def test_a_runner_without_graphs_counts_no_misses(checkpoint: Path) -> None:
    runner = create_runner(RunnerArgs(model_dir=checkpoint, device="cuda", dtype="float32", cuda_graphs=False))
    assert runner.is_asynchronous and runner.graph_misses is None
    runner.close()
