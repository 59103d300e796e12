"""Which addresses a client may make a worker connect to.

``ipaddress`` alone does not say: to Python 3.11 the site-local ``fec0::/10``, both NAT64 prefixes, 6to4's relays and
multicast are global.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from trtx.media.errors import MediaError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port to addresses, best first; raises OSError for a name that has none."""

_LOOKUPS = 16  # at a time; a lookup that hangs keeps its thread for as long as the system's resolver waits

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # its last 32 bits are the IPv4 address that is meant
_UNICAST = ipaddress.IPv6Network("2000::/3")  # all that IANA has given out
# Inside what ``is_global`` calls global: protocols and tunnels with no host of a site's own behind them, some of which
# hold an IPv4 address, and what Azure's machines call their host by.
_SPECIAL = tuple(
    ipaddress.ip_network(one)
    for one in (
        "192.0.0.0/24",  # protocol assignments; Oracle's metadata
        "192.88.99.0/24",  # 6to4 relays
        "168.63.129.16/32",  # Azure's host
        "2001::/23",  # Teredo, benchmarking, ORCHID
        "2001:db8::/32",
        "2002::/16",  # 6to4
        "3fff::/20",  # documentation
    )
)
# What an operator may open: networks of one's own. Never metadata services on link-local addresses.
_PRIVATE = tuple(
    ipaddress.ip_network(one)
    for one in (
        "127.0.0.0/8",
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "100.64.0.0/10",
        "::1/128",
        "fc00::/7",
    )
)
# Metadata services inside of these.
_METADATA = (ipaddress.ip_address("100.100.100.200"), ipaddress.ip_address("fd00:ec2::254"))


def is_allowed(text: str, *, allow_private: bool) -> bool:
    """Whether an address, as a resolver writes it, may be connected to. False for what is no address."""
    try:
        address = _meant(ipaddress.ip_address(text))
    except ValueError:
        return False
    if allow_private and address not in _METADATA and _is_in(address, _PRIVATE):
        return True
    if not address.is_global or address.is_multicast or _is_in(address, _SPECIAL):
        return False
    return address.version == 4 or address in _UNICAST


async def look_up(host: str, port: int) -> Sequence[str]:
    """The system's resolver, which takes decimal, hexadecimal and short forms of addresses for addresses too.

    In threads of its own: names whose servers never answer hold up no other work of the process.
    """
    infos = await asyncio.get_running_loop().run_in_executor(
        _lookup_threads(), functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    )
    return tuple(dict.fromkeys(str(info[4][0]) for info in infos))


async def checked_addresses(host: str, port: int, resolve: Resolver, *, allow_private: bool) -> Sequence[str]:
    """The addresses of ``host``, each of which may be connected to. One that may not refuses them all.

    Raises MediaError 403 for that, 400 for a name without an address.
    """
    try:
        addresses = await resolve(host, port)
    except (OSError, UnicodeError):
        addresses = ()
    if not addresses:
        raise MediaError(400, f"no address was found for the media host {_shown(host)}; check the URL")
    if not all(is_allowed(address, allow_private=allow_private) for address in addresses):
        # Without the address: a client learns nothing of the networks that a worker is in.
        raise MediaError(
            403,
            f"the media host {_shown(host)} is at an address that is private or reserved; use one that is public"
            + ("" if allow_private else ", or ask the operator for --allow-private-media"),
        )
    return addresses


def _meant(address: Address) -> Address:
    """The IPv4 address inside an IPv6 one, where that is what is connected to."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            raise ValueError("an address of one interface")
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _is_in(address: Address, networks: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]) -> bool:
    return any(address in network for network in networks)


@functools.cache
def _lookup_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="media-dns")


def _shown(host: str) -> str:
    return host if len(host) <= 64 else host[:61] + "..."
