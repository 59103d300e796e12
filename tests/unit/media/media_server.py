"""A server on 127.0.0.1 whose every path answers in a way of its own, most of them badly."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from trtx.media import MediaLimits

OPEN = MediaLimits(
    allow_http_media=True, allow_private_media=True, max_media_bytes=1 << 20, media_timeout_s=60, media_idle_s=30
)
"""Limits with which this server can be reached at all, and which no test waits for."""

PICTURE = b"\x89PNG, as far as fetching knows" * 100
_CHUNK = b"x" * 65536


@dataclass
class Server:
    port: int = 0
    heads: list[bytes] = field(default_factory=list)  # request line and headers, in the order of their arrival
    sent: int = 0  # bytes of bodies that were accepted by the socket

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    server = Server()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            server.heads.append(head)
            path = head.split(b" ", 2)[1].decode()
            await _ANSWERS[path.partition("?")[0]](server, path, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client left, which is what most of these are for
        finally:
            writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    tasks = asyncio.all_tasks()
    try:
        yield server
    finally:
        listener.close()
        for task in asyncio.all_tasks() - tasks - {asyncio.current_task()}:
            task.cancel()


def _head(status: str, *lines: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode()


async def _picture(server: Server, path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(_head("200 OK", "Content-Type: image/png", f"Content-Length: {len(PICTURE)}") + PICTURE)
    await writer.drain()


async def _lying_type(server: Server, path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(_head("200 OK", "Content-Type: text/html", f"Content-Length: {len(PICTURE)}") + PICTURE)
    await writer.drain()


async def _too_short(server: Server, path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(_head("200 OK", f"Content-Length: {len(PICTURE) + 1000}") + PICTURE)
    await writer.drain()


async def _too_long(server: Server, path: str, writer: asyncio.StreamWriter) -> None:
    """Fewer bytes are stated than are sent."""
    writer.write(_head("200 OK", "Content-Length: 100") + PICTURE)
    await writer.drain()


async def _states_a_lot(server: Server, path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(_head("200 OK", f"Content-Length: {300 << 20}"))
    await writer.drain()
    await asyncio.Event().wait()  # whoever waits for the body, waits


async def _endless(server: Server, path: str, writer: asyncio.StreamWriter) -> None:
    """Chunks of 64 KiB, up to 300 MiB, without a word of how many will come."""
    writer.write(_head("200 OK", "Transfer-Encoding: chunked"))
    for _ in range((300 << 20) // len(_CHUNK)):
        writer.write(b"%x\r\n%s\r\n" % (len(_CHUNK), _CHUNK))
        await writer.drain()
        server.sent += len(_CHUNK)


async def _drips(server: Server, path: str, writer: asyncio.StreamWriter) -> None:
    """A byte every 10 ms for ever: never idle, never done."""
    writer.write(_head("200 OK", "Content-Length: 1000000"))
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


async def _drips_its_head(server: Server, path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-More: yes\r\n")
        await writer.drain()
        await asyncio.sleep(0.01)


async def _stops(server: Server, path: str, writer: asyncio.StreamWriter) -> None:
    """In the middle, with the connection open."""
    writer.write(_head("200 OK", "Content-Length: 1000000") + b"x" * 1000)
    await writer.drain()
    await asyncio.Event().wait()


async def _silent(server: Server, path: str, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def _gzip_bomb(server: Server, path: str, writer: asyncio.StreamWriter) -> None:
    bomb = gzip.compress(bytes(64 << 20))
    writer.write(_head("200 OK", "Content-Encoding: gzip", f"Content-Length: {len(bomb)}") + bomb)
    await writer.drain()


async def _headers_without_end(server: Server, path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    for number in range(100_000):
        writer.write(b"X-%d: %s\r\n" % (number, b"y" * 100))
        await writer.drain()


async def _no_http(server: Server, path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"220 mail.example.com ESMTP\r\n")
    await writer.drain()


async def _empty(server: Server, path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(_head("200 OK", "Content-Length: 0"))
    await writer.drain()


async def _missing(server: Server, path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(_head("404 Not Found", "Content-Length: 0"))
    await writer.drain()


async def _partial(server: Server, path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(_head("206 Partial Content", "Content-Length: 4") + b"part")
    await writer.drain()


async def _to(server: Server, path: str, writer: asyncio.StreamWriter) -> None:
    """``/to?URL``: there. Its body never ends, as nobody has to read it."""
    writer.write(_head("302 Found", f"Location: {path.partition('?')[2]}", "Content-Length: 1000000"))
    await writer.drain()
    await asyncio.Event().wait()


async def _nowhere(server: Server, path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(_head("302 Found", "Content-Length: 0"))
    await writer.drain()


async def _far(server: Server, path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(_head("302 Found", f"Location: /{'a' * 9000}", "Content-Length: 0"))
    await writer.drain()


async def _loop(server: Server, path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(_head("301 Moved Permanently", "Location: /loop", "Content-Length: 0"))
    await writer.drain()


_Answer = Callable[[Server, str, asyncio.StreamWriter], Awaitable[None]]
_ANSWERS: dict[str, _Answer] = {
    "/picture": _picture,
    "/lying-type": _lying_type,
    "/too-short": _too_short,
    "/too-long": _too_long,
    "/states-a-lot": _states_a_lot,
    "/endless": _endless,
    "/drips": _drips,
    "/drips-its-head": _drips_its_head,
    "/stops": _stops,
    "/silent": _silent,
    "/gzip-bomb": _gzip_bomb,
    "/headers-without-end": _headers_without_end,
    "/no-http": _no_http,
    "/empty": _empty,
    "/missing": _missing,
    "/partial": _partial,
    "/to": _to,
    "/nowhere": _nowhere,
    "/far": _far,
    "/loop": _loop,
}
