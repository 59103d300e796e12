"""Fetches a file over http or https from a checked address; no second lookup follows the check.

Uses httpcore, the connection layer of httpx, whose network backend is a parameter: the one place where a name becomes a
connection. Host header, SNI and certificate check still use the URL's host. Ignores proxies in the environment, keeps
no cookies, and accepts no content encoding.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx

from trtx.config.media import MediaLimits
from trtx.media.addresses import Resolver, checked_addresses
from trtx.media.errors import MediaError, too_large
from trtx.tls import default_trust

MAX_REDIRECTS = 3
_MAX_URL_CHARACTERS = 8192
_REDIRECTS = (301, 302, 303, 307, 308)
_CONNECT_S = 5.0  # for each address but the last, if the host has several


class _CheckedAddresses(httpcore.AsyncNetworkBackend):
    """A network backend that connects to checked addresses only."""

    def __init__(self, resolve: Resolver, allow_private: bool) -> None:
        self._resolve = resolve
        self._allow_private = allow_private
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        addresses = await checked_addresses(host, port, self._resolve, allow_private=self._allow_private)
        for address in addresses[:-1]:
            try:
                return await self._network.connect_tcp(address, port, _CONNECT_S, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._network.connect_tcp(addresses[-1], port, timeout, local_address, socket_options)


async def get(url: str, label: str, limits: MediaLimits, resolve: Resolver) -> bytes:
    """The response body. Raises MediaError. The connection is closed in any case."""
    try:
        async with asyncio.timeout(limits.media_timeout_s):
            backend = _CheckedAddresses(resolve, limits.allow_private_media)
            async with httpcore.AsyncConnectionPool(
                ssl_context=await asyncio.to_thread(default_trust), max_connections=1, network_backend=backend
            ) as connections:
                return await _follow(connections, url, label, limits)
    except TimeoutError:
        raise MediaError(
            408, f"{label} was not there after {limits.media_timeout_s:g} s; use a faster server"
        ) from None
    except httpcore.TimeoutException:
        raise MediaError(408, f"the server of {label} said nothing for {limits.media_idle_s:g} s") from None
    except httpcore.ConnectError as error:
        if isinstance(error.__cause__, ssl.SSLError) or "CERTIFICATE" in str(error).upper():
            raise MediaError(424, f"the server of {label} has a certificate that this machine does not trust") from None
        raise MediaError(424, f"the server of {label} can't be connected to") from None
    except httpcore.RemoteProtocolError:
        raise MediaError(
            424, f"the server of {label} closed the connection early, or does not speak valid HTTP/1.1"
        ) from None
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol):
        raise MediaError(424, f"the connection to the server of {label} broke") from None


async def _follow(connections: httpcore.AsyncConnectionPool, url: str, label: str, limits: MediaLimits) -> bytes:
    if len(url) > _MAX_URL_CHARACTERS:
        raise MediaError(400, f"{label} has {len(url)} characters; expected at most {_MAX_URL_CHARACTERS}")
    try:
        at = _parsed(url)
    except ValueError:
        raise MediaError(400, f"{label} is not a valid URL") from None
    for _ in range(MAX_REDIRECTS + 1):
        _check_scheme(at, label, limits)
        idle = limits.media_idle_s
        request = httpcore.Request(
            "GET",
            httpcore.URL(scheme=at.raw_scheme, host=at.raw_host, port=at.port, target=at.raw_path),
            headers=[
                (b"host", at.netloc),
                (b"user-agent", b"trtx"),
                (b"accept", b"*/*"),
                (b"accept-encoding", b"identity"),
                (b"connection", b"close"),
            ],
            extensions={"timeout": {"connect": idle, "read": idle, "write": idle, "pool": idle}},
        )
        response = await connections.handle_async_request(request)
        try:
            if response.status not in _REDIRECTS:
                return await _body(response, label, limits)
            at = _redirected(at, response, label)
        finally:
            await response.aclose()
    raise MediaError(424, f"{label} was redirected more than {MAX_REDIRECTS} times; use the URL at the end")


def _parsed(url: str, base: httpx.URL | None = None) -> httpx.URL:
    """Parses a URL. Raises ValueError if it is invalid; some faults, such as bad punycode, only show when the host is
    read.
    """
    try:
        found = httpx.URL(url) if base is None else base.join(url)
        host, port = found.host, found.port
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(f"no URL: {error}") from error
    if port is not None and not (0 < port < 1 << 16 and host):
        raise ValueError(f"no port: {port}")
    return found


def _check_scheme(at: httpx.URL, label: str, limits: MediaLimits) -> None:
    """Raises MediaError for a disallowed scheme or userinfo. The address is checked when connecting."""
    if at.scheme not in ("http", "https"):
        raise MediaError(403, f"{label} redirects to a URL that is neither http: nor https:; only these are followed")
    if not at.host:
        raise MediaError(400, f"{label} has no host, or redirects to a URL without one; expected https://host/path")
    if at.scheme == "http" and not limits.allow_http_media:
        raise MediaError(403, f"{label} is fetched over plain http:; use https:, or start with --allow-http-media")
    if at.userinfo:
        raise MediaError(
            400, f"{label} has, or redirects to a URL with, a user name or password; use a URL without them"
        )


def _redirected(at: httpx.URL, response: httpcore.Response, label: str) -> httpx.URL:
    place = next((value for name, value in response.headers if name.lower() == b"location"), None)
    if place is None:
        raise MediaError(424, f"the server of {label} redirects without an address")
    if len(place) > _MAX_URL_CHARACTERS:
        raise MediaError(
            424, f"the server of {label} redirects to {len(place)} characters; expected at most {_MAX_URL_CHARACTERS}"
        )
    try:
        return _parsed(place.decode("ascii"), at)
    except ValueError:  # also UnicodeDecodeError, a subclass
        raise MediaError(424, f"the server of {label} redirects to an invalid URL") from None


async def _body(response: httpcore.Response, label: str, limits: MediaLimits) -> bytes:
    if response.status != 200:
        raise MediaError(424, f"the server of {label} answered {response.status}; expected 200")
    headers = {name.lower(): value for name, value in response.headers}
    if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"", b"identity"):
        raise MediaError(415, f"the server of {label} compressed its answer, which was not requested")
    stated = headers.get(b"content-length", b"")
    if stated.isdigit() and int(stated[:20]) > limits.max_media_bytes:
        raise too_large(label, limits.max_media_bytes)
    chunks, size = [], 0
    async for chunk in response.aiter_stream():
        size += len(chunk)
        if size > limits.max_media_bytes:
            raise too_large(label, limits.max_media_bytes)
        chunks.append(chunk)
    return b"".join(chunks)
