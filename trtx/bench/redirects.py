"""Detects HTTP redirects and proxies, neither of which trtx uses.

Redirects are never followed: the benchmark would measure a different host from the one named, or send each request
twice, and the request's content would reach an unintended host. Proxies from the environment are bypassed for the same
reason. aiperf bypasses them, because the proxy's time is not the server's; all other requests of a run must do the same
to reach the same server.
"""

from __future__ import annotations

from urllib.parse import urljoin, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from trtx.config.wording import shown

_STATUSES = (301, 302, 303, 307, 308)


def sent_on(status: int | None, location: str | None, asked: str) -> str | None:
    """A clause that describes where a response to a request for the URL ``asked`` redirects; None if it doesn't.

    ``location`` is the response's Location header. User info and query are not shown, because they may contain secrets.
    """
    if status not in _STATUSES:
        return None
    if not location:
        return "it redirects without an address"
    try:
        found = urlsplit(urljoin(asked, location))
        where = urlunsplit((found.scheme, found.netloc.rpartition("@")[2], found.path, "", ""))
    except ValueError:
        where = "something that is not an address"
    return f"it redirects to {shown(where)}, and trtx follows no redirect"


def proxy_passed(url: str) -> str:
    """A clause saying that the environment's proxy for ``url`` is bypassed; empty if there is none.

    The proxy itself is not shown, because its address may contain a password.
    """
    parts = urlsplit(url)
    if parts.scheme not in getproxies() or proxy_bypass(parts.hostname or ""):
        return ""
    return (
        f"; {parts.scheme.upper()}_PROXY is set, but trtx and aiperf bypass it, because its delay would be measured as "
        "the server's: run on a machine that reaches the server without a proxy"
    )
