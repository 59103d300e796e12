"""The metrics of a topology's GPUs, one formula each: utilization, power, memory, energy and cost of tokens.

They are computed over whole trials and over steady parts from :class:`GpuPart`, which joins the requests of a part with
the readings of the GPUs. A trial without a value leaves its cell without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trtx.bench.gpu_use import GpuPart
from trtx.bench.metric_types import MeasuredMetric, Records, metric, per_device
from trtx.bench.metrics import Heading
from trtx.bench.phases import Span

_SINCE = 7  # version of cell.json
_GIB = 1 << 30
_MILLION = 1e6
_HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True, eq=False)
class GpuNumber(MeasuredMetric[float | None]):
    """A number of parts of trials, whose formula gets a GpuPart: the mean over trials or, for a peak, the highest."""

    is_peak: bool = False

    def over(self, trials: Sequence[Records]) -> Any:
        return None  # records alone say nothing about GPUs

    def over_parts(self, trials: Sequence[Records], spans: Sequence[Span] | None, gpus: Sequence[GpuPart]) -> Any:
        values = [value for part in gpus if (value := self.formula(part)) is not None]
        if not values or len(values) < len(gpus):
            return None
        return max(values) if self.is_peak else sum(values) / len(values)


def _of_gpus(**fields: Any) -> Callable[[Callable[[GpuPart], float | None]], GpuNumber]:
    statistic = "max" if fields.get("is_peak") else "avg"
    return metric(GpuNumber, since=_SINCE, if_known=True, statistic=statistic, **fields)


@_of_gpus(
    title="GPU use",
    unit="%",
    meaning="share of the time in which a kernel ran on a GPU, as NVML samples it; mean over GPUs, time and trials",
    better="higher",
    heading=Heading.GPUS,
    label="use %",
)
def gpu_utilization(part: GpuPart) -> float | None:
    return part.use.utilization_percent


@_of_gpus(
    title="peak GPU use",
    unit="%",
    meaning="the highest sample of one GPU",
    better="higher",
    heading=Heading.GPUS,
    label="peak %",
    is_peak=True,
)
def gpu_utilization_peak(part: GpuPart) -> float | None:
    return part.use.peak_utilization_percent


@_of_gpus(
    title="power",
    unit="W",
    meaning="energy of all GPUs of the topology / time; mean over trials",
    better="lower",
    heading=Heading.GPUS,
    label="W",
)
def gpu_power(part: GpuPart) -> float | None:
    return _ratio(part.use.energy_j, part.duration_s)


gpu_power_per_device = per_device(
    gpu_power,
    title="W/{device}",
    unit="W/{device}",
    meaning="power / all GPUs of the topology",
    heading=Heading.GPUS,
    label="W/{device}",
    if_known=True,
)


@_of_gpus(
    title="peak power",
    unit="W",
    meaning="the highest sum over the GPUs of the power that NVML reports at one moment, which is a "
    "mean over up to 1 s",
    better="lower",
    heading=Heading.GPUS,
    label="peak W",
    is_peak=True,
)
def gpu_power_peak(part: GpuPart) -> float | None:
    return part.use.peak_power_w


@_of_gpus(
    title="peak power of one GPU",
    unit="W",
    meaning="the highest power that NVML reports for one GPU",
    better="lower",
    heading=Heading.GPUS,
    label="peak W, one GPU",
    is_peak=True,
)
def single_gpu_power_peak(part: GpuPart) -> float | None:
    return part.use.peak_power_of_one_w


@_of_gpus(
    title="peak GPU memory",
    unit="GiB",
    meaning="the highest use of one GPU's memory",
    better="lower",
    heading=Heading.GPUS,
    label="peak GiB",
    is_peak=True,
)
def gpu_memory_peak(part: GpuPart) -> float | None:
    return _ratio(part.use.peak_memory_bytes, _GIB)


@_of_gpus(
    title="J/output token",
    unit="J/token",
    meaning="energy of all GPUs of the topology, including those for prefill and encode / output tokens of successful "
    "requests; mean over trials",
    better="lower",
    heading=Heading.ENERGY,
    label="output",
)
def energy_per_output_token(part: GpuPart) -> float | None:
    return _ratio(part.use.energy_j, part.output_tokens)


@_of_gpus(
    title="J/token",
    unit="J/token",
    meaning="the same energy / input and output tokens of successful requests; input tokens count also if a prefix "
    "cache had them; mean over trials",
    better="lower",
    heading=Heading.ENERGY,
    label="all",
)
def energy_per_token(part: GpuPart) -> float | None:
    return _ratio(part.use.energy_j, _all_tokens(part))


@_of_gpus(
    title="cost/M output tokens",
    unit="/M tokens",
    meaning="--gpu-hour-price × GPUs of the topology × hours / output tokens of successful requests × 1,000,000, in "
    "the currency of the price; mean over trials",
    better="lower",
    heading=Heading.COST,
    label="output",
)
def cost_per_million_output_tokens(part: GpuPart) -> float | None:
    return _ratio(_cost(part), part.output_tokens, _MILLION)


@_of_gpus(
    title="cost/M tokens",
    unit="/M tokens",
    meaning="the same cost / input and output tokens of successful requests × 1,000,000; mean over trials",
    better="lower",
    heading=Heading.COST,
    label="all",
)
def cost_per_million_tokens(part: GpuPart) -> float | None:
    return _ratio(_cost(part), _all_tokens(part), _MILLION)


def _cost(part: GpuPart) -> float | None:
    """The price of the topology's GPUs for the time of the part."""
    if part.gpus.hour_price is None or not part.gpus.count:
        return None
    return part.gpus.hour_price * part.gpus.count * part.duration_s / _HOUR_S


def _all_tokens(part: GpuPart) -> float | None:
    return None if part.input_tokens is None or part.output_tokens is None else part.input_tokens + part.output_tokens


def _ratio(amount: float | None, divisor: float | None, factor: float = 1.0) -> float | None:
    return None if amount is None or not divisor else factor * amount / divisor
