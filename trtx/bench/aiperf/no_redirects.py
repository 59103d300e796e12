"""Keeps aiperf 0.13.0 at the server that it was told to ask: aiohttp follows a redirect, and no record says a word.

Imported where aiperf is, before it forks. Drop it when a release can be told not to.
"""

from __future__ import annotations

from typing import Any

from aiperf.common.models import ErrorDetails, RequestRecord
from aiperf.transports.aiohttp_client import AioHttpClient

from trtx.bench.redirects import sent_on

_request = AioHttpClient._request


async def _request_here(self: AioHttpClient, method: str, url: str, headers: Any, **said: Any) -> RequestRecord:
    record = await _request(self, method, url, headers, **said, allow_redirects=False)
    told = {name.lower(): value for name, value in (record.trace_data.response_headers or {}).items()}
    if where := sent_on(record.status, told.get("location"), url):
        record.error = ErrorDetails(code=record.status, type="Redirect", message=where)
    return record


AioHttpClient._request = _request_here
