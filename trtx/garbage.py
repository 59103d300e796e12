"""Python's garbage collector in processes that serve: what they loaded is kept from it, and it comes less often."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 10_000
"""How many more objects came than went, until the next collection. With 256 streams open a worker has as many more at
one time as at another, which go by themselves: of Python's 700 a collection came each 7 ms, took 13 % of the
interpreter's time and stopped everything for up to 26 ms; of 10,000 one a second, 2 %."""


@contextmanager
def nothing_of_it_is_garbage() -> Iterator[None]:
    """For what stays as long as the process: imports, weights. Looking at it again and again took a third of the
    imports' time, and would be repeated by each collection of the oldest generation."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(NEW_OBJECTS, 10, 10)
        gc.enable()
