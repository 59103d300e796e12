"""Settings of Python's garbage collector for long processes: it skips loaded objects and runs less often."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 10_000
"""The collection threshold: the number of allocations, less deallocations, that triggers a collection.

With 256 open streams, a worker's number of live objects fluctuates by about this much, and reference counting alone
frees these objects. With Python's default of 700, a collection ran every 7 ms, took 13 % of the interpreter's time and
paused it for up to 26 ms. With 10,000, a collection runs once a second and takes 2 %.
"""


@contextmanager
def nothing_of_it_is_garbage() -> Iterator[None]:
    """A context manager for loading objects that live as long as the process, such as imports and weights.

    It disables collection inside the block and then excludes all objects from later collections. Scanning them took a
    third of the time of the imports, and each collection of the oldest generation would scan them again.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(NEW_OBJECTS, 10, 10)
        gc.enable()
