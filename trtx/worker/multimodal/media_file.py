"""Passes an image or a video to another process of the topology through a temporary file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from trtx.engine.api import SharedTensor, remove_shared
from trtx.media import Blob


@asynccontextmanager
async def file_of(blob: Blob, share: Callable[[Any], SharedTensor]) -> AsyncIterator[SharedTensor]:
    """Provides a file with the bytes of ``blob``, written by ``share`` in a thread. Removes it when the context ends.

    If the caller is cancelled while ``share`` is writing, the file is removed once it has been written.
    """
    import numpy as np

    data = np.frombuffer(blob.data, np.uint8)
    writing = asyncio.get_running_loop().run_in_executor(None, share, data)
    try:
        yield await asyncio.shield(writing)
    finally:
        if writing.done():
            _remove_written(writing)
        else:
            writing.add_done_callback(_remove_written)


def _remove_written(writing: asyncio.Future[SharedTensor]) -> None:
    if not writing.cancelled() and writing.exception() is None:
        remove_shared(writing.result())
