"""The errors that end one request, and the check of values that cross to the engine's process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class RequestError(RuntimeError):
    """One request can't be served as it is; all others are unaffected. The text is for the client."""


class RequestFailed(RequestError):
    """One valid request could not be answered; all others are unaffected.

    The model's logits were not finite, or the engine had an internal error.
    """


class MediaNeeded(RequestFailed):
    """The engine must compute the prompt but lacks embeddings: they were never put, or were dropped.

    Put the embeddings of ``keys`` and submit the request again, unchanged. If the client has already received tokens,
    submit a ``generation_only`` request instead, with all of them as ``first_gen_tokens`` and without ``opaque_state``:
    the peer's KV was read already, or is unavailable.
    """

    def __init__(self, text: str, keys: Sequence[bytes]) -> None:
        super().__init__(text)
        self.keys = tuple(keys)


def typed(kind: Any, value: Any, name: str) -> Any:
    """Converts ``value`` to the type in the message to the engine.

    Raises RequestError for a wrong type anywhere in ``value``. A value that is refused here affects no other request.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"{name} holds a value of the wrong type: {error}") from error
