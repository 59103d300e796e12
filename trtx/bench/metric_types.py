"""The record type of a metric, which determines its place in a cell's file, the summaries and the report page.

The records themselves are in ``metrics.py``, each next to its formula. Code refers to a metric by its record, not by
name, so a misspelt metric fails at import instead of being silently absent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from string import Formatter
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_type_hints

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from trtx.bench.gpu_use import GpuPart
from trtx.bench.phases import Span, sent_in
from trtx.bench.records import RequestRecord, read_also
from trtx.stats.percentiles import percentile, samples_needed

Records = Sequence[RequestRecord]
RecordFilter = Callable[[Records], Records]
T = TypeVar("T")
N = TypeVar("N", int, float, int | None, float | None)
F = TypeVar("F", bound="Metric[Any]")
M = TypeVar("M", bound="MeasuredMetric[Any]")

Better = Literal["higher", "lower"]
PERCENTILES = (50, 90, 95, 99)
FIRST_SCHEMA = 4  # oldest schema of cell.json that is read; metrics added later state their schema


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of one metric's samples, pooled over the trials of a cell."""

    count: int
    avg: float
    percentiles: Mapping[int, float | None]  # None: the cell's file is older than this percentile

    def __getitem__(self, q: int) -> float | None:
        """The q-th percentile. Raises KeyError for a percentile that the metric's record doesn't list."""
        return self.percentiles[q]

    def supports(self, q: int) -> bool:
        """Whether there are enough samples to state the q-th percentile (see ``samples_needed``)."""
        return self.count >= samples_needed(q)


@dataclass(frozen=True, slots=True)
class ValueRange:
    """The minimum and maximum over requests, which a mean would hide."""

    min: float
    max: float


def whole(records: Records) -> Records:
    """All measured requests of a trial."""
    return records


@dataclass(frozen=True, kw_only=True, eq=False)
class Metric(ABC, Generic[T]):
    """One metric with all its metadata. In the texts of a per-device metric, ``{device}`` becomes GPU or worker.

    A column shows one number of the metric: None is the value itself or its mean, 90 is its 90th percentile.
    """

    _filled_in: ClassVar[frozenset[str]] = frozenset()  # placeholders that texts may contain

    name: str  # key in cell.json and in the summaries; aiperf's name of the metric
    title: str
    unit: str
    meaning: str  # formula in words, for the report page and docs/reference/metrics.md
    heading: Enum | None  # column group of the report page; None: not on the page
    # The better direction for a server; None: the metric describes the load, not the server.
    better: Better | None = None
    statistic: str = "avg"  # aiperf's name for the statistic in column None
    label: str = ""  # label below the heading for a column that is not a percentile; unique within the heading
    table: Mapping[int | None, str] = field(default_factory=dict)  # columns of the terminal table, with their headers
    markdown: Sequence[int | None] = ()  # columns of summary.md
    of_images: bool = False  # shown only in runs whose requests have images
    if_known: bool = False  # shown only in runs in which a cell has a value
    of_stream: bool = False  # undefined for requests that are answered without streaming

    def __post_init__(self) -> None:
        filled = {part for text in self._texts for _, part, *_ in Formatter().parse(text) if part is not None}
        if wrong := filled - self._filled_in:
            raise ValueError(
                f"metric {self.name}: its texts have {{{'}, {'.join(sorted(wrong))}}}; expected no placeholder, or "
                f"{{device}} in a metric that per_device(…) creates"
            )
        if self.heading is not None and self.heading.value.endswith(", ms") and self.unit != "ms":
            raise ValueError(
                f"metric {self.name}: its unit is {self.unit}, but its heading is {self.heading.value!r}; use ms, or "
                "another heading"
            )
        for place in ("table", "markdown"):
            if unknown := set(getattr(self, place)) - set(self.columns):
                raise ValueError(
                    f"metric {self.name}: {place} has the columns {unknown}, but the metric has only {self.columns}"
                )

    @property
    def _texts(self) -> tuple[str, ...]:
        """Texts in which the device placeholder is replaced."""
        return (self.title, self.unit, self.label, *self.table.values())

    @property
    def columns(self) -> tuple[int | None, ...]:
        return (None,)

    def key(self, device: str) -> str:
        """The metric's key in the summaries of a run with this kind of device."""
        return self.name

    @abstractmethod
    def read(self, figures: Figures, device_count: int | None) -> T:
        """The metric's value in the metrics of one cell."""

    def number(self, value: T, column: int | None) -> float | None:
        """The number to show in a column."""
        return value  # type: ignore[return-value]

    def flat(self, value: T | None, key: str) -> dict[str, Any]:
        """The metric's keys and values in one row of the summaries."""
        return {key: value}


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredMetric(Metric[T]):
    """A metric that is computed from the records of a cell's trials and stored in the cell's file."""

    formula: Callable[..., Any]  # of the records of one trial or of all, or of one part of a trial for GPUs
    reads: Sequence[str] = ()  # aiperf's metrics that the formula reads in addition to the fields of RequestRecord
    window: RecordFilter = whole  # selects the records of a trial to compute from
    since: int = FIRST_SCHEMA  # first schema of cell.json with this metric; it is None in older cells

    def read(self, figures: Figures, device_count: int | None) -> T:
        return figures[self]

    @abstractmethod
    def over(self, trials: Sequence[Records]) -> Any:
        """The value to store, computed over the trials of a cell. Each trial has already been cut to the window."""

    def over_spans(self, trials: Sequence[Records], spans: Sequence[Span]) -> Any:
        """The value to store, computed over one part of each trial: the requests sent within its span."""
        return self.over([sent_in(trial, span) for trial, span in zip(trials, spans, strict=True)])

    def over_parts(self, trials: Sequence[Records], spans: Sequence[Span] | None, gpus: Sequence[GpuPart]) -> Any:
        """The value to store, over whole trials or over one span of each. ``gpus``: the same parts, if known."""
        cut = [self.window(trial) for trial in trials]
        return self.over(cut) if spans is None else self.over_spans(cut, spans)

    def restored(self, kept: Any) -> T:
        """The metric's value, from the result of :meth:`over` or from a file."""
        return kept  # type: ignore[no-any-return]  # checked when the file was read

    def form(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The pydantic schema of the stored value."""
        return handler.generate_schema(get_type_hints(self.formula)["return"])

    def __call__(self, records: Records) -> T:
        """The metric of one trial."""
        return self.restored(self.over([self.window(records)]))


@dataclass(frozen=True, kw_only=True, eq=False)
class Number(MeasuredMetric[N]):
    """A single number, computed over the requests of all trials together, or as the mean of the trials' values."""

    mean_over_trials: bool = False
    samples: Callable[[Figures], int] | None = None  # number of requests behind a median; None: all that succeeded
    # Computes it over a span, if time enters; requires mean_over_trials.
    within: Callable[[Records, Span], N] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mean_over_trials != (self.within is not None):
            raise ValueError(
                f"metric {self.name}: mean_over_trials and within= both concern time; give both or neither"
            )

    def over(self, trials: Sequence[Records]) -> Any:
        if not self.mean_over_trials:
            return self.formula([record for trial in trials for record in trial])
        return self._mean([self.formula(trial) for trial in trials])

    def over_spans(self, trials: Sequence[Records], spans: Sequence[Span]) -> Any:
        if self.within is None:
            return MeasuredMetric.over_spans(self, trials, spans)
        return self._mean([self.within(trial, span) for trial, span in zip(trials, spans, strict=True)])

    def _mean(self, values: Sequence[Any]) -> Any:
        # None if a trial lacks it: the mean of the other trials would be biased towards the better ones.
        return None if None in values or not values else sum(values) / len(values)


@dataclass(frozen=True, kw_only=True, eq=False)
class Spread(MeasuredMetric[Distribution | None]):
    """A distribution over requests. ``formula`` returns the samples, or none if the metric can't be computed."""

    percentiles: tuple[int, ...] = PERCENTILES
    percentiles_since: Mapping[int, int] = field(default_factory=dict)  # like ``since``, for percentiles added later

    @property
    def columns(self) -> tuple[int | None, ...]:
        return (None, *self.percentiles)

    def over(self, trials: Sequence[Records]) -> Any:
        samples = self.formula([record for trial in trials for record in trial])
        if not samples:
            return None
        at = {f"p{q}": percentile(samples, q) for q in self.percentiles}
        return {"count": len(samples), "avg": sum(samples) / len(samples), **at}

    def restored(self, kept: Any) -> Distribution | None:
        if kept is None:
            return None
        return Distribution(kept["count"], kept["avg"], {q: kept.get(f"p{q}") for q in self.percentiles})

    def form(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        since = {"count": FIRST_SCHEMA, "avg": FIRST_SCHEMA}
        since |= {f"p{q}": self.percentiles_since.get(q, FIRST_SCHEMA) for q in self.percentiles}
        forms = {key: _not_negative(handler.generate_schema(int if key == "count" else float)) for key in since}
        return core_schema.nullable_schema(_fields(forms, since))

    def number(self, value: Distribution | None, column: int | None) -> float | None:
        return None if value is None else value.avg if column is None else value[column]

    def flat(self, value: Distribution | None, key: str) -> dict[str, Any]:
        flat: dict[str, Any] = {f"{key}_avg": self.number(value, None)}
        flat |= {f"{key}_p{q}": self.number(value, q) for q in self.percentiles}
        supported = [f"p{q}" for q in self.percentiles if value and value.supports(q)]
        return {**flat, f"{key}_count": value and value.count, f"{key}_percentiles_supported": " ".join(supported)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Extent(MeasuredMetric[ValueRange | None]):
    """A minimum and maximum. ``formula`` returns the samples, or none if they can't be computed. It is in no table."""

    @property
    def columns(self) -> tuple[int | None, ...]:
        return ()

    def over(self, trials: Sequence[Records]) -> Any:
        samples = self.formula([record for trial in trials for record in trial])
        return {"min": min(samples), "max": max(samples)} if samples else None

    def restored(self, kept: Any) -> ValueRange | None:
        return None if kept is None else ValueRange(**kept)

    def form(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        number = _not_negative(handler.generate_schema(float))
        return core_schema.nullable_schema(_fields(dict.fromkeys(("min", "max"), number), {}))

    def flat(self, value: ValueRange | None, key: str) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, kw_only=True, eq=False)
class PerDevice(Metric[float | None]):
    """Another metric divided by the number of the topology's GPUs (prefill included), or of its workers without known
    GPUs.

    None if neither number is known.
    """

    _filled_in = frozenset({"device"})

    of: MeasuredMetric[float | None]

    def key(self, device: str) -> str:
        return f"{self.of.name}_per_{device.lower()}"

    def read(self, figures: Figures, device_count: int | None) -> float | None:
        total = figures[self.of]
        return None if total is None or not device_count else total / device_count


_records: dict[str, Metric[Any]] = {}


def all_figures() -> tuple[Metric[Any], ...]:
    """All metric records, in the order of ``metrics.py``, which is also the order of the summaries."""
    return tuple(_records.values())


def latest_schema() -> int:
    """The current schema of cell.json: the one that added the most recent metric or percentile."""
    figures = [record.since for record in all_figures() if isinstance(record, MeasuredMetric)]
    parts = [
        max(record.percentiles_since.values(), default=0) for record in all_figures() if isinstance(record, Spread)
    ]
    return max(*figures, *parts)


def metric(kind: type[M], **fields: Any) -> Callable[[Callable[..., Any]], M]:
    """Decorates a formula: returns its metric record, which takes the function's name."""
    read_also(fields.get("reads", ()))
    return lambda formula: _taken_in(kind(name=formula.__name__, formula=formula, **fields))


def per_device(of: MeasuredMetric[float | None], **fields: Any) -> PerDevice:
    """Creates the per-device record of another metric."""
    return _taken_in(PerDevice(name=f"{of.name}_per_device", of=of, better=of.better, **fields))


def _taken_in(record: F) -> F:
    if record.name in _records:
        raise ValueError(f"two metrics are called {record.name}; rename one of them")
    for other in _records.values():
        if record.heading is not None and (record.heading, record.label) == (other.heading, other.label):
            raise ValueError(
                f"metrics {other.name} and {record.name} are both labelled {record.label!r} under "
                f"{record.heading.value!r}; change one of the labels"
            )
    _records[record.name] = record
    return record


@dataclass(frozen=True, slots=True)
class Figures:
    """The metrics of one cell or one trial, indexed by metric record."""

    stored: Mapping[str, Any]  # as in cell.json

    def __getitem__(self, metric: MeasuredMetric[T]) -> T:
        return metric.restored(self.stored.get(metric.name))

    @classmethod
    def over(
        cls, trials: Sequence[Records], spans: Sequence[Span] | None = None, gpus: Sequence[GpuPart] = ()
    ) -> Figures:
        """Computes all metrics of a cell over whole trials, or over one span of each trial, such as its steady part.

        The two are not comparable: both sides of a comparison must use the same one. ``gpus`` are the same parts of the
        same trials; without them, metrics of GPUs are None.
        """
        measured = [metric for metric in all_figures() if isinstance(metric, MeasuredMetric)]
        return cls({metric.name: metric.over_parts(trials, spans, gpus) for metric in measured})

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        measured = [metric for metric in all_figures() if isinstance(metric, MeasuredMetric)]
        forms = {metric.name: _not_negative(metric.form(handler)) for metric in measured}
        fields = _fields(forms, {metric.name: metric.since for metric in measured})
        written = core_schema.plain_serializer_function_ser_schema(lambda figures: figures.stored)
        return core_schema.no_info_after_validator_function(cls, fields, serialization=written)


def _not_negative(form: CoreSchema) -> CoreSchema:
    """Refuses negative numbers. A negative share of failed requests, for example, would satisfy any bound."""

    def check(value: Any) -> Any:
        if isinstance(value, (int, float)) and value < 0:
            raise PydanticCustomError("negative", "0 or more")
        return value

    return core_schema.no_info_after_validator_function(check, form)


def _fields(forms: Mapping[str, CoreSchema], since: Mapping[str, int]) -> CoreSchema:
    """Schema of an object with these fields.

    A field added later may be missing in an older document. It is then None, and stays None when the document is
    written again, in the current version.
    """
    first = {name: since.get(name, FIRST_SCHEMA) == FIRST_SCHEMA for name in forms}
    forms = {name: form if first[name] else core_schema.nullable_schema(form) for name, form in forms.items()}
    fields = {name: core_schema.typed_dict_field(form, required=first[name]) for name, form in forms.items()}

    def check(found: dict[str, Any], info: core_schema.ValidationInfo) -> dict[str, Any]:
        version = info.context["version"] if info.context else FIRST_SCHEMA
        for name in forms:
            if name not in found and since.get(name, FIRST_SCHEMA) <= version:
                raise PydanticCustomError("missing", "Field required", {"field": name})
        return {name: found.get(name) for name in forms}

    return core_schema.with_info_after_validator_function(check, core_schema.typed_dict_schema(fields))
