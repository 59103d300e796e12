"""The error for a request that the client has to correct."""

from __future__ import annotations

from trtx.errors import TrtxError


class InvalidRequest(TrtxError):
    """The client's request is invalid. The client gets the message, which names the field, the value and the range."""
