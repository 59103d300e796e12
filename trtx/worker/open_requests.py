"""A request in the engine's hands, and the way out of it that the engine can take."""

from __future__ import annotations

import contextlib
from typing import Any


class OpenRequest:
    """An engine's result. ``is_receiving``: its KV is still on the way from a prefill worker, in an engine that leaks
    blocks or hangs when that is cut off (ai-dynamo/dynamo #7489): an abort waits for the first token then."""

    def __init__(self, result: Any, *, is_receiving: bool) -> None:
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
        """Reads on for a request that nobody waits for, until the engine is done with it."""
        with contextlib.suppress(Exception):  # its outcome is nobody's; the engine's health is watched elsewhere
            async for step in self.result:
                if step.outputs[0].token_ids:
                    self.saw_token()
