"""The requests that the engine is working on, and how to abort them safely."""

from __future__ import annotations

import contextlib

from trtx.engine.api import Result
from trtx.worker.background import Background


class OpenRequest:
    """An engine's result, and when it may be aborted.

    ``is_receiving``: the KV is still being read from a prefill worker, by an engine that leaks blocks or hangs if the
    read is cut off (ai-dynamo/dynamo #7489). An abort then waits for the first token.
    """

    def __init__(self, result: Result, *, is_receiving: bool) -> None:
        self.result = result
        self.is_receiving = is_receiving
        self._is_unwanted = False

    def abort(self) -> None:
        self._is_unwanted = True
        if not self.is_receiving and not self.result.finished:
            self.result.abort()

    def saw_token(self) -> None:
        if self.is_receiving:
            self.is_receiving = False
            if self._is_unwanted:
                self.abort()

    async def see_out(self) -> None:
        """Reads the steps of an abandoned request until the engine has finished it."""
        with contextlib.suppress(Exception):  # the outcome is not used; the engine's health is watched elsewhere
            async for step in self.result:
                if step.outputs[0].token_ids:
                    self.saw_token()


class OpenRequests:
    """The open requests by Dynamo's context id, for abort and drain."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._open: dict[str, OpenRequest] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, name: str, opened: OpenRequest) -> None:
        self._open[name] = opened

    def abort(self, name: str) -> None:
        if (opened := self._open.get(name)) is not None:
            opened.abort()

    def abort_all(self) -> None:
        for opened in list(self._open.values()):
            opened.abort()

    def close(self, name: str, opened: OpenRequest, *, engine_died: bool) -> None:
        """Removes a request that has ended, or whose client has gone, and aborts it in the engine if it still runs."""
        if not opened.result.finished and not engine_died:
            opened.abort()
            if opened.is_receiving:
                self._background.begin(self._see_out(name, opened))
                return
        self._open.pop(name, None)

    async def _see_out(self, name: str, opened: OpenRequest) -> None:
        await opened.see_out()
        self._open.pop(name, None)
