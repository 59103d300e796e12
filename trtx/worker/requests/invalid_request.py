"""The error for a request that the client has to correct."""

from __future__ import annotations

from trtx.errors import TrtxError


class InvalidRequest(TrtxError):
    """The client's fault: the message names field, value and range, and reaches the client."""
