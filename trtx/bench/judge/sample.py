"""The inputs of a check: one number of a metric, selected by name, and one cell's data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal

from trtx.bench.cells import Cell, DeviceKind
from trtx.bench.draft_metrics import DraftNumber
from trtx.bench.gpu_metrics import GpuNumber
from trtx.bench.judge.checks import ValidityLevel
from trtx.bench.metric_types import Distribution, Figures, Metric, Number, PerDevice, all_figures
from trtx.bench.metrics import error_request_count, request_count
from trtx.errors import UsageError
from trtx.stats.percentiles import samples_needed

DEVICES: dict[DeviceKind, str] = {"gpu": "GPU", "worker": "worker"}  # names for users
_NOT_READ = "it needs readings of the GPUs over all of each trial or, for a cost, --gpu-hour-price"
_NOT_COUNTED = "no request had drafted tokens, or neither the workers' metrics nor the answers count them"
Window = Literal["whole", "steady"]  # part of each trial that counts: all of it, or its steady part


@dataclass(frozen=True, slots=True)
class MetricColumn:
    """Selects one number of a cell: a metric and, if the metric is a distribution, one of its columns."""

    metric: Metric[Any]
    column: int | None  # one of metric.columns
    device: DeviceKind | None = None  # requested device kind of a per-device metric; None: the cell's own

    @property
    def name(self) -> str:
        """The name as typed on the command line: ``time_to_first_token:p99``."""
        metric = self.metric
        return f"{metric.name if self.device is None else metric.key(DEVICES[self.device])}:{self.statistic}"

    @property
    def unit(self) -> str:
        return self.unit_over(self.device)

    def unit_over(self, device: DeviceKind | None) -> str:
        """The metric's unit with the kind of device filled in, such as tokens/s/GPU; None: "device"."""
        return self.metric.unit.format(device="device" if device is None else DEVICES[device])

    @property
    def statistic(self) -> str:
        """aiperf's name of the statistic: avg, p99."""
        return _statistic(self.metric, self.column)

    @property
    def samples_needed(self) -> int:
        """Number of requests required to state the value; 0 unless it is a percentile."""
        return samples_needed(float(self.statistic[1:])) if self.statistic.startswith("p") else 0

    def of(self, figures: Figures | None, device_count: int | None) -> float | None:
        """The value among the metrics of a cell or a trial; None if it can't be computed."""
        return None if figures is None else self.metric.number(self.metric.read(figures, device_count), self.column)

    def count(self, figures: Figures | None, device_count: int | None) -> int:
        """Number of requests behind the value; 0 if there is no value."""
        if figures is None:
            return 0
        value = self.metric.read(figures, device_count)
        if isinstance(value, Distribution):
            return value.count
        if value is None:
            return 0
        samples = self.metric.samples if isinstance(self.metric, Number) else None
        return figures[request_count] if samples is None else samples(figures)


@dataclass(frozen=True, slots=True)
class CellSample:
    """The data of one cell that judgements use."""

    cell: str
    device_count: int | None  # None: unknown
    figures: Figures | None  # over all trials; None: no result
    trials: tuple[Figures | None, ...]  # per trial, or per block of an A/B run
    validity: ValidityLevel = ValidityLevel.VALID
    doubts: tuple[str, ...] = ()  # why validity is not VALID
    failure: str | None = None  # why there is no result
    window: Window = "whole"  # the part of each trial that values refer to
    steady: Figures | None = None  # over the steady parts of all trials; None: a trial has none
    steady_trials: tuple[Figures | None, ...] = ()
    device: DeviceKind | None = None  # what device_count counts; None: unknown
    gpu_reasons: tuple[str, ...] = ()  # why metrics of GPUs are not known

    @classmethod
    def of(cls, cell: Cell, window: Window = "whole") -> CellSample:
        """The sample of a measured cell. Requested trials that are missing count as trials without a result."""
        absent: tuple[None, ...] = (None,) * (cell.trials_asked - len(cell.trials))
        return cls(
            cell=cell.name,
            device_count=cell.device_count,
            figures=cell.figures,
            trials=(*(trial.figures for trial in cell.trials), *absent),
            validity=ValidityLevel.VALID if cell.validity is None else cell.validity.level,
            doubts=() if cell.validity is None else tuple(reason.sentence for reason in cell.validity.reasons),
            failure=cell.failure,
            window=window,
            steady=cell.steady,
            steady_trials=(*(trial.steady for trial in cell.trials), *absent),
            device=cell.device,
            gpu_reasons=cell.gpu_reasons,
        )

    @property
    def whole(self) -> CellSample:
        """The same sample over whole trials. Error rates use it, because failed requests count wherever they occur."""
        return replace(self, window="whole")

    @property
    def where(self) -> str:
        """A suffix for messages that names the window; empty for whole trials."""
        return "" if self.window == "whole" else " over the steady part"

    def value(self, metric: MetricColumn) -> float | None:
        """The metric over all trials."""
        return metric.of(self._judged, self._devices(metric))

    def values(self, metric: MetricColumn) -> tuple[float | None, ...]:
        """The metric of each trial."""
        return tuple(metric.of(trial, self._devices(metric)) for trial in self._judged_trials)

    def lacks_device(self, metric: MetricColumn) -> str | None:
        """Returns why the metric can't be computed for the requested kind of device; None if it can."""
        if metric.device is None or self.device in (None, metric.device):
            return None
        asked, there = DEVICES[metric.device], DEVICES[self.device]
        return f"it is per {asked}, but the topology's number of {asked}s is not known; use {metric.metric.key(there)}"

    def lacks_readings(self, metric: MetricColumn) -> str | None:
        """Returns why a metric of GPUs or of speculation is not known; None if it is known, and for other metrics."""
        of = metric.metric.of if isinstance(metric.metric, PerDevice) else metric.metric
        if not isinstance(of, (GpuNumber, DraftNumber)) or None not in (self.value(metric), *self.values(metric)):
            return None
        return _NOT_COUNTED if isinstance(of, DraftNumber) else "; ".join(self.gpu_reasons) or _NOT_READ

    def missing_trials(self) -> list[int]:
        """Numbers (from 1) of trials without a result.

        The remaining trials alone would be a biased sample, because the worst trials are the ones without a result.
        """
        return [number for number, trial in enumerate(self.trials, 1) if trial is None]

    def count(self, metric: MetricColumn) -> int:
        """Number of requests behind the metric over all trials."""
        return metric.count(self._judged, self._devices(metric))

    def trials_without_steady(self) -> list[int]:
        """Numbers (from 1) of trials with a result but without a steady part."""
        pairs = zip(self.trials, self.steady_trials, strict=True)
        return [number for number, (trial, steady) in enumerate(pairs, 1) if trial is not None and steady is None]

    def supports(self, metric: MetricColumn) -> bool:
        """Whether there are enough requests to state the metric."""
        return self.count(metric) >= metric.samples_needed

    def fewest_samples(self, metric: MetricColumn) -> int:
        """Number of requests behind the metric in the trial with the fewest."""
        return min((metric.count(trial, self._devices(metric)) for trial in self._judged_trials), default=0)

    def _devices(self, metric: MetricColumn) -> int | None:
        return None if self.lacks_device(metric) else self.device_count

    @property
    def _judged(self) -> Figures | None:
        return self.figures if self.window == "whole" else self.steady

    @property
    def _judged_trials(self) -> tuple[Figures | None, ...]:
        return self.trials if self.window == "whole" else self.steady_trials

    def requests(self) -> tuple[int, int]:
        """Number of successful and of failed requests, in whole trials."""
        return (0, 0) if self.figures is None else (self.figures[request_count], self.figures[error_request_count])


def _statistic(metric: Metric[Any], column: int | None) -> str:
    return metric.statistic if column is None else f"p{column}"


def parse_metric(text: str, typed: str) -> MetricColumn:
    """Parses ``time_to_first_token:p99``, or a bare name if the metric is a single number.

    Raises UsageError, with a message that begins with ``typed``, the option and its value. A per-device metric may also
    be given by its name in the summaries, ``output_token_throughput_per_gpu``.
    """
    name, colon, statistic = text.partition(":")
    metric, device = _metric(name, typed)
    columns = {_statistic(metric, column): column for column in metric.columns}
    if not colon and len(columns) == 1:
        return MetricColumn(metric, None, device)
    if not colon:
        raise UsageError(f"{typed}: {name} is a distribution; name one of its statistics, such as {name}:p50")
    if statistic not in columns:
        raise UsageError(f"{typed}: {name} has no statistic {statistic!r}; expected one of {', '.join(columns)}")
    return MetricColumn(metric, columns[statistic], device)


def _metric(name: str, typed: str) -> tuple[Metric[Any], DeviceKind | None]:
    judged = [metric for metric in all_figures() if metric.columns]
    known: dict[str, tuple[Metric[Any], DeviceKind | None]] = {
        metric.key(spoken): (metric, kind) for metric in judged for kind, spoken in DEVICES.items()
    }
    known |= {metric.name: (metric, None) for metric in judged}
    if name in known:
        return known[name]
    titles = {metric.title.lower(): metric.name for metric in judged}
    near = [titles[name.lower()]] if name.lower() in titles else get_close_matches(name, known, n=3, cutoff=0.5)
    expected = f"did you mean {' or '.join(near)}" if near else f"expected one of {', '.join(known)}"
    raise UsageError(f"{typed}: no metric is called {name!r}; {expected}")


def parse_percent(option: str, text: str) -> float:
    """Parses ``5%`` as 5.0. Raises UsageError; the percent sign is required, because 0.05 could mean 5 % or 0.05 %."""
    number = text.removesuffix("%").strip()
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not text.endswith("%") or not 0 <= value <= 100:
        raise UsageError(
            f"{option} {text}: expected a percentage from 0% to 100% with the percent sign, such as {option} 5%"
        )
    return value
