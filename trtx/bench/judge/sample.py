"""What a judgement takes of a run: one metric by its name, and the sample that one cell is of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal

from trtx.bench.cells import Cell, DeviceKind
from trtx.bench.figures import Distribution, Figure, Figures, Number, all_figures
from trtx.bench.judge.checks import Level
from trtx.bench.metrics import error_request_count, request_count
from trtx.errors import UsageError
from trtx.stats.percentiles import samples_needed

DEVICES: dict[DeviceKind, str] = {"gpu": "GPU", "worker": "worker"}  # as people call them
Window = Literal["whole", "steady"]  # of each trial: all of it, or its steady part


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a cell: a figure, and which column of it."""

    figure: Figure[Any]
    column: int | None  # as in the figure's own columns
    device: DeviceKind | None = None  # that it was asked over, of a figure per device; None: over what a cell has

    @property
    def name(self) -> str:
        """``time_to_first_token:p99``, as it is typed."""
        figure = self.figure
        return f"{figure.name if self.device is None else figure.key(DEVICES[self.device])}:{self.statistic}"

    @property
    def unit(self) -> str:
        return self.unit_over(self.device)

    def unit_over(self, device: DeviceKind | None) -> str:
        """Of a value over these devices; None: whatever they are."""
        return self.figure.unit.format(device="device" if device is None else DEVICES[device])

    @property
    def statistic(self) -> str:
        """aiperf's word for it: avg, p99."""
        return _statistic(self.figure, self.column)

    @property
    def samples_needed(self) -> int:
        """Requests that it takes before it may be stated; 0 for what is no percentile."""
        return samples_needed(float(self.statistic[1:])) if self.statistic.startswith("p") else 0

    def of(self, figures: Figures | None, device_count: int | None) -> float | None:
        """Its value among the figures of a cell or a trial; None where it can't be computed."""
        return None if figures is None else self.figure.number(self.figure.read(figures, device_count), self.column)

    def count(self, figures: Figures | None, device_count: int | None) -> int:
        """How many requests its value is of; 0 where there is none."""
        if figures is None:
            return 0
        value = self.figure.read(figures, device_count)
        if isinstance(value, Distribution):
            return value.count
        if value is None:
            return 0
        samples = self.figure.samples if isinstance(self.figure, Number) else None
        return figures[request_count] if samples is None else samples(figures)


@dataclass(frozen=True, slots=True)
class Sample:
    """One cell, as far as it is judged."""

    cell: str
    device_count: int | None  # None: not known
    figures: Figures | None  # over all trials; None: there is no result
    trials: tuple[Figures | None, ...]  # of each trial; in an A/B run, of each round
    validity: Level = Level.VALID
    doubts: tuple[str, ...] = ()  # why it is not VALID
    failure: str | None = None  # why there is no result
    window: Window = "whole"  # that its values are of
    steady: Figures | None = None  # over all trials' steady parts; None: one of them has none
    steady_trials: tuple[Figures | None, ...] = ()
    device: DeviceKind | None = None  # what device_count counts; None: not known

    @classmethod
    def of(cls, cell: Cell, window: Window = "whole") -> Sample:
        """Of a cell as it was measured. A trial that was asked for and is not there has no result."""
        absent: tuple[None, ...] = (None,) * (cell.trials_asked - len(cell.trials))
        return cls(
            cell=cell.name,
            device_count=cell.device_count,
            figures=cell.figures,
            trials=(*(trial.figures for trial in cell.trials), *absent),
            validity=Level.VALID if cell.validity is None else cell.validity.level,
            doubts=() if cell.validity is None else tuple(reason.sentence for reason in cell.validity.reasons),
            failure=cell.failure,
            window=window,
            steady=cell.steady,
            steady_trials=(*(trial.steady for trial in cell.trials), *absent),
            device=cell.device,
        )

    @property
    def whole(self) -> Sample:
        """The same cell over whole trials: a request that failed has failed in whatever part."""
        return replace(self, window="whole")

    @property
    def where(self) -> str:
        """Behind a value, which part it is of; nothing behind one of whole trials."""
        return "" if self.window == "whole" else " over the steady part"

    def value(self, metric: Metric) -> float | None:
        """Over all trials."""
        return metric.of(self._judged, self._devices(metric))

    def values(self, metric: Metric) -> tuple[float | None, ...]:
        """Of each trial."""
        return tuple(metric.of(trial, self._devices(metric)) for trial in self._judged_trials)

    def lacks_device(self, metric: Metric) -> str | None:
        """Why it has no value over the devices that were asked for; None where it has those, or none were."""
        if metric.device is None or self.device in (None, metric.device):
            return None
        asked, there = DEVICES[metric.device], DEVICES[self.device]
        return f"it is over {asked}s, and of this topology none is known; expected {metric.figure.key(there)}"

    def missing_trials(self) -> list[int]:
        """Numbers, from 1, of those without a result: the others alone would be the better half."""
        return [number for number, trial in enumerate(self.trials, 1) if trial is None]

    def count(self, metric: Metric) -> int:
        """Requests behind its value over all trials."""
        return metric.count(self._judged, self._devices(metric))

    def trials_without_steady(self) -> list[int]:
        """Numbers, from 1, of those with a result and no steady part."""
        pairs = zip(self.trials, self.steady_trials, strict=True)
        return [number for number, (trial, steady) in enumerate(pairs, 1) if trial is not None and steady is None]

    def supports(self, metric: Metric) -> bool:
        """Whether those are enough to state it."""
        return self.count(metric) >= metric.samples_needed

    def fewest_samples(self, metric: Metric) -> int:
        """Requests behind its value in the trial that has the fewest."""
        return min((metric.count(trial, self._devices(metric)) for trial in self._judged_trials), default=0)

    def _devices(self, metric: Metric) -> int | None:
        return None if self.lacks_device(metric) else self.device_count

    @property
    def _judged(self) -> Figures | None:
        return self.figures if self.window == "whole" else self.steady

    @property
    def _judged_trials(self) -> tuple[Figures | None, ...]:
        return self.trials if self.window == "whole" else self.steady_trials

    def requests(self) -> tuple[int, int]:
        """How many succeeded, and how many failed, in whole trials."""
        return (0, 0) if self.figures is None else (self.figures[request_count], self.figures[error_request_count])


def _statistic(figure: Figure[Any], column: int | None) -> str:
    return figure.statistic if column is None else f"p{column}"


def parse_metric(text: str, typed: str) -> Metric:
    """``time_to_first_token:p99``, or the name alone of a figure that is one number.

    Or UsageError, which begins with ``typed``, the option and its value. A figure per device is known by its name in
    the summaries too, ``output_token_throughput_per_gpu``.
    """
    name, colon, statistic = text.partition(":")
    figure, device = _figure(name, typed)
    columns = {_statistic(figure, column): column for column in figure.columns}
    if not colon and len(columns) == 1:
        return Metric(figure, None, device)
    if not colon:
        raise UsageError(f"{typed}: {name} is a distribution; expected which number of it, as {name}:p50")
    if statistic not in columns:
        raise UsageError(f"{typed}: {name} has no statistic {statistic!r}; expected one of {', '.join(columns)}")
    return Metric(figure, columns[statistic], device)


def _figure(name: str, typed: str) -> tuple[Figure[Any], DeviceKind | None]:
    judged = [figure for figure in all_figures() if figure.columns]
    known: dict[str, tuple[Figure[Any], DeviceKind | None]] = {
        figure.key(spoken): (figure, kind) for figure in judged for kind, spoken in DEVICES.items()
    }
    known |= {figure.name: (figure, None) for figure in judged}
    if name in known:
        return known[name]
    titles = {figure.title.lower(): figure.name for figure in judged}
    near = [titles[name.lower()]] if name.lower() in titles else get_close_matches(name, known, n=3, cutoff=0.5)
    expected = f"did you mean {' or '.join(near)}" if near else f"expected one of {', '.join(known)}"
    raise UsageError(f"{typed}: no metric is called {name!r}; {expected}")


def parse_percent(option: str, text: str) -> float:
    """``5%`` as 5.0. Or UsageError, for a number alone too: 0.05 may mean either."""
    number = text.removesuffix("%").strip()
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not text.endswith("%") or not 0 <= value <= 100:
        raise UsageError(f"{option} {text}: expected a percentage from 0% to 100%, with its sign, as {option} 5%")
    return value
