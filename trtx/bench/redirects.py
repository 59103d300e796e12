"""A server that sends its client on to another address. Nobody here follows: another host would be measured than was
named, or each request be sent twice, and what a request carries would go where nobody meant it to go. So it would by
a proxy that the environment names: aiperf goes past it, as no proxy's time is a server's, and so does every other
request, or a run would ask one server and measure another.
"""

from __future__ import annotations

from urllib.parse import urljoin, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from trtx.config.wording import shown

_STATUSES = (301, 302, 303, 307, 308)


def sent_on(status: int | None, location: str | None, asked: str) -> str | None:
    """That an answer to ``asked``, an address, leads elsewhere, in a clause; None where it does not.

    ``location``: of its header. Of that no user and no query is shown: either may hold a secret.
    """
    if status not in _STATUSES:
        return None
    if not location:
        return "it sends on, and does not say to where"
    try:
        found = urlsplit(urljoin(asked, location))
        where = urlunsplit((found.scheme, found.netloc.rpartition("@")[2], found.path, "", ""))
    except ValueError:
        where = "what is no address"
    return f"it sends on to {shown(where)}, and no redirect is followed"


def proxy_passed(url: str) -> str:
    """That the environment names a proxy for ``url`` and that it is not taken, as a clause; empty where it names none.
    Not shown itself: its address may hold a password."""
    parts = urlsplit(url)
    if parts.scheme not in getproxies() or proxy_bypass(parts.hostname or ""):
        return ""
    return (
        f"; {parts.scheme.upper()}_PROXY is set, and trtx and aiperf go past it, as its time would be measured as the "
        "server's: run where the server is reached without it"
    )
