"""Reads the output format of a request from the body that aiperf sent.

aiperf 0.13.0 keeps the body of a request in its record only on request (``KEPT_BODIES`` of ``bench/endpoint``).
"""

from __future__ import annotations

import json
from typing import Any

from trtx.bench.answer_formats import RequestedFormat, WrongFormat, requested_format


def sent_body(record: Any) -> dict[str, Any] | None:
    """The body that aiperf sent for a record; None if the record doesn't have it."""
    sent = getattr(record.request_info, "payload_bytes", None)
    if not sent:
        return None
    body = json.loads(sent)
    return body if isinstance(body, dict) else None


def sent_format(body: dict[str, Any]) -> RequestedFormat | None:
    """The format that a sent body demands; None if it demands none and offers no tools."""
    try:
        return requested_format(body)
    except WrongFormat as error:  # for example one format from the record and another from extra_inputs
        return RequestedFormat.unreadable(str(error))
