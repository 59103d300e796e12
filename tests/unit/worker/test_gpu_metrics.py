"""A worker's GPU metrics are what NVML says when the port is read; what it does not say is absent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.doctor.scripted_nvml import GIB, H100S, refuses, script_two_gpus
from trtx.worker.gpu_metrics import GpuMetrics
from trtx.worker.served_families import FAMILIES

# Readings of an H100 SXM under load, by NVML's function.
RECORDED: dict[str, Any] = {
    "nvmlDeviceGetIndex": lambda handle: H100S.index(handle),
    "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=97, memory=61),
    "nvmlDeviceGetClockInfo": lambda handle, kind: 2619 if kind == pynvml.NVML_CLOCK_MEM else 1410,
    "nvmlDeviceGetTotalEnergyConsumption": lambda handle: 123_456_789,
    "nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: (
        4 if kind == pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED else 1
    ),
    "nvmlDeviceGetFieldValues": lambda handle, fields: [
        SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=kib)) for kib in (3, 5)
    ],
}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    script_two_gpus(monkeypatch)
    for name, answer in RECORDED.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", H100S[1])
    return monkeypatch


def scraped(metrics: GpuMetrics) -> dict[tuple[str, ...], float]:
    """(Sample name, its labels' values but the GPU's) -> value, of the only GPU."""
    registry = CollectorRegistry()
    registry.register(metrics)  # type: ignore[arg-type]
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("gpu"), labels.pop("uuid")) == ("1", H100S[1])
            found[sample.name, *labels.values()] = sample.value
    return found


def test_each_reading_is_served_in_base_units(gpus: pytest.MonkeyPatch) -> None:
    found = scraped(GpuMetrics())
    assert {name for name, *_ in found} == {name for name in FAMILIES if name.startswith("trtx_gpu_")}
    assert found["trtx_gpu_utilization_ratio",] == 0.97
    assert (found["trtx_gpu_sm_clock_hertz",], found["trtx_gpu_max_sm_clock_hertz",]) == (1.41e9, 1.98e9)
    assert found["trtx_gpu_memory_clock_hertz",] == 2.619e9
    assert (found["trtx_gpu_power_watts",], found["trtx_gpu_energy_joules_total",]) == (345.5, 123_456.789)
    assert found["trtx_gpu_temperature_celsius",] == 88
    assert (found["trtx_gpu_memory_used_bytes",], found["trtx_gpu_memory_total_bytes",]) == (GIB, 80 * GIB)
    assert found["trtx_gpu_ecc_errors_total", "corrected"] == 4
    assert found["trtx_gpu_ecc_errors_total", "uncorrected"] == 1
    assert found["trtx_gpu_nvlink_bytes_total", "sent"] == 3 * 1024
    assert found["trtx_gpu_nvlink_bytes_total", "received"] == 5 * 1024


def test_a_reason_that_slows_the_clocks_is_1_and_the_others_are_0(gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(
        pynvml, "nvmlDeviceGetCurrentClocksEventReasons", lambda handle: pynvml.nvmlClocksEventReasonHwThermalSlowdown
    )
    found = scraped(GpuMetrics())
    reasons = {key[1]: value for key, value in found.items() if key[0] == "trtx_gpu_clock_reason"}
    assert [reason for reason, value in reasons.items() if value] == ["thermal, by hardware"]
    assert len(reasons) == 9


def test_a_value_is_read_again_at_each_scrape(gpus: pytest.MonkeyPatch) -> None:
    metrics = GpuMetrics()
    assert scraped(metrics)["trtx_gpu_power_watts",] == 345.5
    gpus.setattr(pynvml, "nvmlDeviceGetPowerUsage", lambda handle: 700_000)
    assert scraped(metrics)["trtx_gpu_power_watts",] == 700


@pytest.mark.parametrize(
    ("function", "family"),
    [
        ("nvmlDeviceGetUtilizationRates", "trtx_gpu_utilization_ratio"),
        ("nvmlDeviceGetTotalEnergyConsumption", "trtx_gpu_energy_joules_total"),
        ("nvmlDeviceGetTotalEccErrors", "trtx_gpu_ecc_errors_total"),
        ("nvmlDeviceGetCurrentClocksEventReasons", "trtx_gpu_clock_reason"),
        ("nvmlDeviceGetFieldValues", "trtx_gpu_nvlink_bytes_total"),
        ("nvmlDeviceGetMemoryInfo", "trtx_gpu_memory_used_bytes"),
    ],
)
def test_a_value_that_nvml_refuses_is_absent_and_the_others_are_served(
    gpus: pytest.MonkeyPatch, function: str, family: str
) -> None:
    gpus.setattr(pynvml, function, refuses)
    found = {name for name, *_ in scraped(GpuMetrics())}
    assert family not in found
    assert "trtx_gpu_power_watts" in found


def test_one_nvlink_counter_may_be_missing(gpus: pytest.MonkeyPatch) -> None:
    answers = [
        SimpleNamespace(nvmlReturn=pynvml.NVML_ERROR_NOT_SUPPORTED, value=SimpleNamespace(ullVal=0)),
        SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=7)),
    ]
    gpus.setattr(pynvml, "nvmlDeviceGetFieldValues", lambda handle, fields: answers)
    found = scraped(GpuMetrics())
    assert ("trtx_gpu_nvlink_bytes_total", "sent") not in found
    assert found["trtx_gpu_nvlink_bytes_total", "received"] == 7 * 1024


def test_a_worker_without_gpus_or_without_nvml_serves_none(gpus: pytest.MonkeyPatch) -> None:
    gpus.setenv("CUDA_VISIBLE_DEVICES", "")
    assert scraped(GpuMetrics()) == {}
    gpus.setenv("CUDA_VISIBLE_DEVICES", H100S[0])
    gpus.setattr(pynvml, "nvmlInit", refuses)
    assert scraped(GpuMetrics()) == {}
