"""Confidence intervals of proportions."""

from __future__ import annotations

import math
from statistics import NormalDist


def wilson_interval(right: float, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's interval (1927, JASA 22:209) of the share right / count, within 0 to 1."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, weight = right / count, z * z / count
    middle, half = share + weight / 2, z * math.sqrt(share * (1 - share) / count + weight / (4 * count))
    low, high = (middle - half) / (1 + weight), (middle + half) / (1 + weight)
    return low if right else 0.0, high if right < count else 1.0  # rounding could exceed 0 or 1
