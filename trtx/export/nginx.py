"""Generates nginx's configuration for the frontends of a topology, from the addresses that ``trtx serve`` plans.

Tested with nginx 1.22.1 and Dynamo 1.4.2. If a frontend dies, nginx sends a request to another frontend unless part of
its response was already sent. The first part of a streamed response is its header, which Dynamo sends before the first
token.
"""

from __future__ import annotations

import ipaddress
import math
import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trtx.config import TopologySpec
from trtx.config.hosts import HostsSpec
from trtx.config.wording import shown
from trtx.errors import UsageError
from trtx.export.files import ExportedFile
from trtx.tls import handshake
from trtx.topology import ServerTls

FILE = "trtx.conf"
_UNQUOTABLE = re.compile(r"[$\"'\\{};\x00-\x1f\x7f]")  # characters with a meaning in nginx's configuration language
_KEY = re.compile(r"^sk-|^[\"']?bearer ", re.IGNORECASE)  # an API key itself in place of the name of the key file
_CONNECT_S = 1  # the timeout for a host that is down; a port without a listener refuses at once
# How long nginx avoids a frontend after a failed request. While the frontend's host is down, one request per this time
# waits for a connection to it. It is short because, once all frontends have failed, nginx answers 502 for as long.
_AWAY_S = 2
_ANSWER = "1h"  # a response that is not streamed arrives as a whole, and may take long
_KEEPALIVE = 64  # idle connections to the frontends that each nginx process keeps open
_RETRIED = (
    "To another frontend goes what this one has sent no part of an answer to: it is gone, has no worker (503), or was",
    "started again and knows no model yet (404). A prompt has no effect but its answer, so a POST is sent again too.",
    "Of a stream, the header comes before the first token: what is cut after it is the client's to send again.",
)
_NO_KEY = '{"error": {"message": "an API key is needed", "type": "invalid_request_error", "code": "invalid_api_key"}}'
_TOO_MANY = (
    '{"error": {"message": "too many requests; try again later", "type": "rate_limit_error", "code": '
    '"rate_limit_exceeded"}}'
)
_LEAST_RATE = 1 / 60  # nginx counts whole requests a second or a minute
_NOT_HERE = '{"error": {"message": "asked of each frontend, not of the gateway", "type": "not_found", "code": 404}}'


@dataclass(frozen=True, slots=True)
class RateLimits:
    """How many POSTs a second nginx passes on, of all clients and of each API key. None: no limit.

    ``burst``: how many more may come at once. None: as many as in a second, at least 1.
    """

    of_all: float | None = None
    of_key: float | None = None
    burst: int | None = None

    def zones(self) -> Iterator[tuple[str, str, float]]:
        """Name, nginx's variable and rate of each limit."""
        if self.of_all is not None:
            yield "trtx_all", "$trtx_any_post", self.of_all
        if self.of_key is not None:
            yield "trtx_keys", "$trtx_post_of", self.of_key

    def burst_of(self, rate: float) -> int:
        return max(1, math.ceil(rate)) if self.burst is None else self.burst


@dataclass(frozen=True, slots=True)
class Gateway:
    """The address that nginx listens on, and the frontends that it forwards requests to."""

    listen: tuple[str, int]
    frontends: tuple[tuple[str, int], ...]
    body_mib: int  # the largest request body that the frontends accept
    tls: ServerTls | None = None  # nginx's own certificate
    frontend_tls: ServerTls | None = None
    api_keys: Path | None = None  # a map file of nginx: "Bearer <key>" name;
    rates: RateLimits = RateLimits()


def frontends_of(spec: TopologySpec, count: int, hosts: HostsSpec | None) -> tuple[tuple[str, int], ...]:
    """Returns address and port of each frontend that ``trtx serve`` starts with the same options.

    ``count``: the number of frontends on a single machine. Raises UsageError for addresses that nginx can't use.
    """
    if spec.port == 0:
        raise UsageError("--port 0 means any free port, but nginx needs a fixed one; give the port of trtx serve")
    if hosts is not None:
        found = [(one.address, spec.port + index) for one in hosts.hosts for index in range(hosts.frontends_of(one))]
    else:
        if spec.host in ("0.0.0.0", "::"):
            raise UsageError(
                f"--host {spec.host} lets everybody go round nginx; leave it out, here and of trtx serve, and the "
                "frontends listen on loopback"
            )
        found = [(spec.host, spec.port + index) for index in range(count)]
    if any(port > 65535 for _, port in found):
        raise UsageError(f"--port {spec.port} leaves no ports for all frontends; give a lower one")
    return tuple(found)


def parse_listen(text: str) -> tuple[str, int]:
    """Parses ``ADDRESS:PORT``, with an IPv6 address in brackets. Raises UsageError."""
    address, _, port = text.rpartition(":")
    try:
        found = str(ipaddress.ip_address(address.removeprefix("[").removesuffix("]") if "[" in address else address))
        if (":" in found) == address.startswith("[") and port.isdecimal() and 0 < int(port) < 1 << 16:
            return found, int(port)
    except ValueError:
        pass
    raise UsageError(f"--listen {shown(text)} is not an address; expected a value such as 127.0.0.1:8080 or [::]:8443")


def export(gateway: Gateway, *, started_by: str) -> ExportedFile:
    """Returns the configuration, a file for the ``http`` section of nginx.

    ``started_by``: the command that starts the frontends. Raises UsageError if nginx would misread a path, could not
    verify the frontends, or would listen on the address of a frontend.
    """
    _check(gateway)
    return ExportedFile(FILE, "\n".join(_lines(gateway, started_by)) + "\n")


def warnings_of(gateway: Gateway) -> tuple[str, ...]:
    """Returns warnings about a gateway that is reachable from other machines without TLS or authentication."""
    address, port = gateway.listen
    if ipaddress.ip_address(address).is_loopback:
        return ()
    lacks = [] if gateway.tls else ["in clear text (--listen-cert and --listen-key)"]
    lacks += [] if gateway.api_keys else ["without authentication (--api-keys)"]
    return (f"nginx would listen on {_joined(address, port)} {' and '.join(lacks)}",) if lacks else ()


def _check(gateway: Gateway) -> None:
    if gateway.api_keys is not None and _KEY.search(gateway.api_keys.name):  # not quoted: it is a key
        raise UsageError("--api-keys is given a key; expected the name of a file with a key in each line")
    if gateway.api_keys is not None and gateway.api_keys.is_dir():
        raise UsageError(
            f"--api-keys {shown(gateway.api_keys)} is a directory; expected a file with a key in each line"
        )
    for option, rate in (("--rate-limit", gateway.rates.of_all), ("--rate-limit-per-key", gateway.rates.of_key)):
        if rate is not None and not (math.isfinite(rate) and rate >= _LEAST_RATE):
            raise UsageError(f"{option} {rate:g} is not a rate; expected requests per second, at least 0.017 (1/min)")
    if gateway.rates.of_key is not None and gateway.api_keys is None:
        raise UsageError("--rate-limit-per-key has no effect without --api-keys; add the file with the keys")
    if gateway.rates.burst is not None and not any(gateway.rates.zones()):
        raise UsageError("--rate-burst has no effect without --rate-limit or --rate-limit-per-key; add one of them")
    for option, tls in (("--listen-cert", gateway.tls), ("--tls-cert", gateway.frontend_tls)):
        for path in () if tls is None else (tls.certificate, tls.key):
            _quoted(option, path)
    address, port = gateway.listen
    for taken in gateway.frontends:
        if taken[1] == port and (taken[0] == address or ipaddress.ip_address(address).is_unspecified):
            raise UsageError(
                f"--listen {_joined(address, port)} is the address of a frontend; choose another port for nginx"
            )
    if gateway.frontend_tls is not None:
        _check_trust(gateway.frontend_tls)


def _check_trust(tls: ServerTls) -> None:
    """Checks that nginx can verify the frontends by their certificate file and a name in it, as OpenSSL does."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.load_cert_chain(tls.certificate, tls.key)
    client.load_verify_locations(tls.certificate)
    try:
        handshake(server, client, _name(tls))
    except ssl.SSLCertVerificationError as error:
        raise UsageError(
            f"--tls-cert {shown(tls.certificate)}: nginx can't verify the frontends with this certificate "
            f"({error.verify_message}); append the certificates of its issuers to the file, up to the root's"
        ) from error


def _name(tls: ServerTls) -> str:
    """Returns a name in the certificate. If it has none, the handshake refuses it."""
    return (tls.names or ("none",))[0].replace("*", "www")


def _lines(gateway: Gateway, started_by: str) -> Iterator[str]:
    scheme = "http" if gateway.frontend_tls is None else "https"
    yield "# Written by trtx export nginx, for the frontends of"
    yield f"#   {started_by}"
    yield "# Include it in the http block of nginx's configuration, on Debian as /etc/nginx/conf.d/trtx.conf. Then:"
    yield "#   nginx -t && nginx -s reload"
    yield "# Each stream takes two of worker_connections in nginx.conf, of which Debian gives a process 768."
    yield ""
    yield "upstream trtx {"
    yield "    zone trtx 256k;  # all processes of nginx know which frontend failed, and count its streams together"
    yield "    least_conn;      # a request may last for minutes, so their number is no measure"
    for address, port in gateway.frontends:
        yield f"    server {_joined(address, port)} max_fails=1 fail_timeout={_AWAY_S}s;"
    yield f"    keepalive {_KEEPALIVE};"
    yield "}"
    if gateway.api_keys is not None:
        yield ""
        yield '# A line for each key, in a file that only nginx can read:   "Bearer sk-..." name-of-its-holder;'
        yield "map $http_authorization $trtx_holder {"
        yield '    default "";'
        yield f"    include {_quoted('--api-keys', gateway.api_keys)};"
        yield "}"
    yield from _zones(gateway.rates)
    yield ""
    yield "server {"
    yield f"    listen {_joined(*gateway.listen)}{'' if gateway.tls is None else ' ssl'};"
    if gateway.tls is not None:
        yield f"    ssl_certificate {_quoted('--listen-cert', gateway.tls.certificate)};"
        yield f"    ssl_certificate_key {_quoted('--listen-key', gateway.tls.key)};"
        yield "    ssl_protocols TLSv1.2 TLSv1.3;"
    yield f"    client_max_body_size {gateway.body_mib}m;  # as the frontends take"
    yield ""
    yield "    location / {"
    if gateway.api_keys is not None:
        yield '        if ($trtx_holder = "") { return 401; }'
        yield "        error_page 401 @no_key;"
        yield '        proxy_set_header Authorization "";  # the key stays here'
    for zone, _, rate in gateway.rates.zones():
        yield f"        limit_req zone={zone} burst={gateway.rates.burst_of(rate)} nodelay;"
    if any(gateway.rates.zones()):
        yield "        limit_req_status 429;"
        yield "        error_page 429 @too_many;"
    yield f"        proxy_pass {scheme}://trtx;"
    if gateway.frontend_tls is not None:
        yield "        proxy_ssl_verify on;"
        yield f"        proxy_ssl_trusted_certificate {_quoted('--tls-cert', gateway.frontend_tls.certificate)};"
        yield f"        proxy_ssl_name {_name(gateway.frontend_tls)};"
        yield "        proxy_ssl_server_name on;"
        yield "        proxy_ssl_protocols TLSv1.2 TLSv1.3;"
    yield "        proxy_http_version 1.1;"
    yield '        proxy_set_header Connection "";  # kept open between requests'
    yield "        proxy_set_header Host $host;"
    yield '        proxy_set_header X-Trtx-Launcher "";  # no client passes the bounds of a frontend'
    yield "        proxy_buffering off;             # each token as it comes"
    yield f"        proxy_connect_timeout {_CONNECT_S}s;"
    yield f"        proxy_read_timeout {_ANSWER};           # an answer that is not a stream comes as a whole"
    yield ""
    for line in _RETRIED:
        yield f"        # {line}"
    yield "        proxy_next_upstream error timeout http_502 http_503 http_404 non_idempotent;"
    yield f"        proxy_next_upstream_tries {len(gateway.frontends)};"
    yield "    }"
    yield ""
    for path in ("/metrics", "/trtx/queue"):
        yield f"    location = {path} {{ default_type application/json; return 404 '{_NOT_HERE}'; }}"
    if any(gateway.rates.zones()):
        yield ""
        yield "    location @too_many {"
        yield "        default_type application/json;"
        yield f"        add_header Retry-After {_retry_s(gateway.rates)} always;"
        yield f"        return 429 '{_TOO_MANY}';"
        yield "    }"
    if gateway.api_keys is not None:
        yield ""
        yield "    location @no_key {"
        yield "        default_type application/json;"
        yield "        add_header WWW-Authenticate Bearer always;"
        yield "        return 401 '" + _NO_KEY + "';"
        yield "    }"
    yield "}"


def _zones(rates: RateLimits) -> Iterator[str]:
    """The limits' counters. Requests other than POSTs have an empty key, which nginx does not count."""
    values = {"$trtx_any_post": "all", "$trtx_post_of": "$trtx_holder"}
    for zone, variable, rate in rates.zones():
        yield ""
        yield f'map $request_method {variable} {{ default ""; POST {values[variable]}; }}'
        whole = f"{int(rate)}r/s" if rate == int(rate) else f"{round(rate * 60)}r/m"
        yield f"limit_req_zone {variable} zone={zone}:1m rate={whole};"


def _retry_s(rates: RateLimits) -> int:
    """Seconds after which the slowest limit takes another request."""
    return max(math.ceil(1 / rate) for _, _, rate in rates.zones())


def _quoted(option: str, path: Path) -> str:
    """Quotes a path for nginx's configuration. Raises UsageError for a path that nginx would misread."""
    text = str(path)
    if _UNQUOTABLE.search(text):
        raise UsageError(
            f"{option} {shown(text)} has a character that nginx's configuration gives a meaning of its own; expected a "
            "path without any of $ \" ' \\ { } ;"
        )
    return f'"{text}"'


def _joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
