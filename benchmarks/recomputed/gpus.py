"""GPU use, power, energy and cost a second time, from the ``readings.json`` of a trial."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

EDGE_NS = 3_000_000_000  # docs/validity.md: the longest time that a reading may be away
GIB = 2**30
PEAKS = ("gpu_utilization_peak", "gpu_power_peak", "single_gpu_power_peak", "gpu_memory_peak")
MEANS = (
    "gpu_utilization", "gpu_power", "energy_per_output_token", "energy_per_token",
    "cost_per_million_output_tokens", "cost_per_million_tokens",
)  # fmt: skip

Values = dict[str, float | None]


@dataclass(frozen=True)
class Gpus:
    """The GPUs of one trial."""

    count: int | None = None  # None: not known; 0: the topology uses none
    hour_price: float | None = None
    readings: list[dict[str, Any]] = field(default_factory=list)
    every: list[dict[str, Any]] = field(default_factory=list)  # readings without GPUs too

    @classmethod
    def of_trial(cls, trial: Path, cell: dict[str, Any], price: float | None) -> Gpus:
        """``cell``: its ``cell.json``, which says how many GPUs the topology has."""
        count = cell["device_count"] if cell["device"] == "gpu" else None
        file = trial / "readings.json"
        readings = json.loads(file.read_text(encoding="utf-8"))["readings"] if file.exists() else []
        return cls(count, price, [one for one in readings if one["gpus"]], readings)


def gpu_values(gpus: Gpus, span: tuple[int, int], inputs: Fraction | None, outputs: Fraction | None) -> Values:
    """The GPU metrics of one span of a trial, in which these tokens were computed."""
    values: Values = dict.fromkeys((*MEANS, *PEAKS))
    seconds = Fraction(span[1] - span[0], 1_000_000_000)
    both = None if inputs is None or outputs is None else inputs + outputs
    per = {"output_tokens": outputs, "tokens": both}
    if gpus.hour_price is not None and gpus.count:
        cost = Fraction(gpus.hour_price) * gpus.count * seconds / 3600
        for what, tokens in per.items():
            values[f"cost_per_million_{what}"] = float(1_000_000 * cost / tokens) if tokens else None
    if not gpus.readings or _is_shared(gpus.readings, span):
        return values
    energies = [_joules(of_gpu, span) for of_gpu in zip(*(one["gpus"] for one in gpus.readings), strict=True)]
    if None not in energies:
        energy = sum((one for one in energies if one is not None), Fraction(0))
        values["gpu_power"] = float(energy / seconds) if seconds else None
        for what, tokens in per.items():
            values[f"energy_per_{what.removesuffix('s')}"] = float(energy / tokens) if tokens else None
    return values | _sampled(gpus.readings, span)


def over_trials(trials: Sequence[Values]) -> Values:
    """Of a cell: the mean, or the highest of a peak; None if a trial has none."""
    found: Values = {}
    for name in (*MEANS, *PEAKS):
        values = [trial[name] for trial in trials]
        known = [value for value in values if value is not None]
        is_known = bool(known) and len(known) == len(values)
        found[name] = (
            (max(known) if name in PEAKS else float(sum(map(Fraction, known)) / len(known))) if is_known else None
        )
    return found


def _pairs(times: Sequence[int], span: tuple[int, int]) -> list[tuple[int, int, int]] | None:
    """Places of the two readings around each piece of the span, with its length in ns; None if an edge has none."""
    pieces = []
    for place in range(1, len(times)):
        length = min(times[place], span[1]) - max(times[place - 1], span[0])
        if length > 0:
            pieces.append((place - 1, place, length))
    if sum(length for *_, length in pieces) < span[1] - span[0] or not pieces:
        return None
    return pieces


def _joules(of_gpu: Sequence[dict[str, Any]], span: tuple[int, int]) -> Fraction | None:
    """The counter's increase: the share of each step between two readings that lies in the span."""
    known = [one for one in of_gpu if one.get("energy_j") is not None]
    times = [one["energy_at_ns"] for one in known]
    pieces = _pairs(times, span)
    if pieces is None:
        return None
    if span[0] - times[pieces[0][0]] > EDGE_NS or times[pieces[-1][1]] - span[1] > EDGE_NS:
        return None
    total = Fraction(0)
    for before, now, length in pieces:
        step = Fraction(known[now]["energy_j"]) - Fraction(known[before]["energy_j"])
        if step < 0:
            return None
        total += step * Fraction(length, times[now] - times[before])
    return total


def _sampled(readings: Sequence[dict[str, Any]], span: tuple[int, int]) -> Values:
    """A reading is worth the time since the one before."""
    times = [one["at_ns"] for one in readings]
    pieces = _pairs(times, span)
    if pieces is None or any(times[now] - times[before] > EDGE_NS for before, now, _ in pieces):
        return {}
    values: Values = {}
    shown = [(readings[now]["gpus"], length) for _, now, length in pieces]
    peaks = {
        "gpu_utilization_peak": ("utilization_percent", 1),
        "single_gpu_power_peak": ("power_w", 1),
        "gpu_memory_peak": ("memory_used_bytes", GIB),
    }
    for name, (key, unit) in peaks.items():
        found = [gpu.get(key) for gpus, _ in shown for gpu in gpus]
        values[name] = None if None in found else max(found) / unit
    if values["single_gpu_power_peak"] is not None:
        values["gpu_power_peak"] = max(sum(gpu["power_w"] for gpu in gpus) for gpus, _ in shown)
    if values["gpu_utilization_peak"] is not None:
        shares = [(Fraction(gpu["utilization_percent"]), length) for gpus, length in shown for gpu in gpus]
        values["gpu_utilization"] = float(sum(s * n for s, n in shares) / sum(n for _, n in shares))
    return values


def _is_shared(readings: Sequence[dict[str, Any]], span: tuple[int, int]) -> bool:
    """Whether a process from outside was seen from the last reading before the span to the first one after it."""
    before = [one["at_ns"] for one in readings if one["at_ns"] <= span[0]]
    after = [one["at_ns"] for one in readings if one["at_ns"] >= span[1]]
    first, last = max(before, default=0), min(after, default=float("inf"))
    return any(gpu["foreign"] for one in readings if first <= one["at_ns"] <= last for gpu in one["gpus"])
