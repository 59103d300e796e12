"""A server that sends its client on to another address. Nobody here follows: another host would be measured than was
named, or each request be sent twice, and what a request carries would go where nobody meant it to go. So it would by
a proxy that the environment names, where the server is on this machine. Pure.
"""

from __future__ import annotations

from urllib.parse import urljoin, urlsplit, urlunsplit

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


def takes_proxy(url: str) -> bool:
    """Whether a proxy of the environment may be asked for it. On loopback none: a proxy has a loopback of its own."""
    host = urlsplit(url).hostname or ""
    return not (host in ("localhost", "::1") or host.startswith("127."))
