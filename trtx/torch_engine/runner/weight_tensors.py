"""The tensors of loaded weights, in an order that depends on the model alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

_BACKENDS = frozenset({"multiplier", "backend", "_product", "load", "group"})
"""Attributes that hold a backend, counters of one, or the group of ranks.

Their tensors are scratch memory, such as the buffer in which the ranks add, or tensors of a weight that are found
elsewhere.
"""


def named_weights(weights: Any) -> dict[str, Tensor]:
    """Returns each tensor once, by the path of its attribute, such as ``layers.0.qkv.weight``.

    Weights of checkpoints with equal configs have the same paths, except that one FP8 scale may stand for all rows.
    """
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, tensor in _walk("", weights):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[path] = tensor
    return found


def _walk(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
        return
    if isinstance(value, tuple):
        parts = [(str(index), part) for index, part in enumerate(value)]
    elif is_dataclass(value):
        parts = [(field.name, getattr(value, field.name)) for field in fields(value)]
    else:
        parts = list(getattr(value, "__dict__", {}).items())
    for name, part in parts:
        if name not in _BACKENDS:
            yield from _walk(f"{path}.{name}" if path else name, part)
