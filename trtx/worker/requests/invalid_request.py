"""The error for a request that the client has to correct."""

from __future__ import annotations

from trtx.errors import TrtxError


class InvalidRequest(TrtxError):
    """The request is at fault. The message names field, value and range, and is shown to the client."""
