"""Decides which addresses a client may make a worker connect to.

``ipaddress`` alone is not enough: Python 3.11 considers the site-local ``fec0::/10``, both NAT64 prefixes, 6to4 relays
and multicast global.
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
"""Resolves host and port to addresses, best first. Raises OSError for a name without addresses."""

_LOOKUPS = 16  # concurrent lookups; a hanging lookup occupies its thread until the system's resolver times out

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # the last 32 bits are the target's IPv4 address
_UNICAST = ipaddress.IPv6Network("2000::/3")  # all unicast addresses allocated by IANA
# Networks that ``is_global`` considers global but that contain no public hosts: protocols and tunnels, some with an
# embedded IPv4 address, and the address under which Azure's machines reach their host.
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
# Private networks that an operator may allow. They never include link-local addresses, where metadata services are.
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
# Metadata services inside these networks.
_METADATA = (ipaddress.ip_address("100.100.100.200"), ipaddress.ip_address("fd00:ec2::254"))


def is_allowed(text: str, *, allow_private: bool) -> bool:
    """Whether the worker may connect to an address, as written by a resolver. False for text that is not an address."""
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
    """Resolves with the system's resolver, which also accepts decimal, hexadecimal and short forms of addresses.

    Runs in a thread pool of its own, so that names whose servers never answer do not block the process's other work.
    """
    infos = await asyncio.get_running_loop().run_in_executor(
        _lookup_threads(), functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    )
    return tuple(dict.fromkeys(str(info[4][0]) for info in infos))


async def checked_addresses(host: str, port: int, resolve: Resolver, *, allow_private: bool) -> Sequence[str]:
    """The addresses of ``host``, all of which are allowed; one disallowed address refuses the host.

    Raises MediaError: 403 for a disallowed address, 400 for a name without addresses.
    """
    try:
        addresses = await resolve(host, port)
    except (OSError, UnicodeError):
        addresses = ()
    if not addresses:
        raise MediaError(400, f"no address was found for the media host {_shown(host)}; check the URL")
    if not all(is_allowed(address, allow_private=allow_private) for address in addresses):
        # The message omits the address, so that a client learns nothing about the worker's networks.
        raise MediaError(
            403,
            f"the media host {_shown(host)} is at an address that is private or reserved; use one that is public"
            + ("" if allow_private else ", or ask the operator for --allow-private-media"),
        )
    return addresses


def _meant(address: Address) -> Address:
    """The IPv4 address embedded in an IPv6 address, if the connection would go there; else the address."""
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
