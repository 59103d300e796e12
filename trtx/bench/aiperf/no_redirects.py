"""Patches aiperf 0.13.0 to refuse HTTP redirects: aiohttp follows them, and no record mentions it.

The host process imports this module before it forks. Remove it once an aiperf release has an option for this.
"""

from __future__ import annotations

from typing import Any

from aiperf.common.models import ErrorDetails, RequestRecord
from aiperf.transports.aiohttp_client import AioHttpClient

from trtx.bench.redirects import sent_on

_request = AioHttpClient._request


async def _request_here(self: AioHttpClient, method: str, url: str, headers: Any, **options: Any) -> RequestRecord:
    record = await _request(self, method, url, headers, **options, allow_redirects=False)
    received = {name.lower(): value for name, value in (record.trace_data.response_headers or {}).items()}
    if where := sent_on(record.status, received.get("location"), url):
        record.error = ErrorDetails(code=record.status, type="Redirect", message=where)
    return record


AioHttpClient._request = _request_here
