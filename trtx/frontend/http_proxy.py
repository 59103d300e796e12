"""The HTTP proxy in a frontend's process: listens on the public port, and forwards requests to Dynamo's on loopback.

It passes answers on unchanged, except tool calls that were cut (``cut_tool_calls``), the events of ``bypass_events``
and those that ``dynamo_connection`` replaces because no worker serves the model.

Dynamo 1.6.1 offers no way to replace its chat template engine or tokenizer in front of its router, but it accepts
prompts as token ids. So the proxy parses each request and makes its prompt in a thread pool. Remove it once Dynamo
renders templates as transformers does, adds the begin-of-text token (ai-dynamo/dynamo #4610), and bounds its queue
(``admission``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trtx.frontend.admission import LAUNCHER_HEADER, AdmissionQueue, Bounds
from trtx.frontend.client_connection import ClientConnection
from trtx.frontend.cut_tool_calls import CallRequest
from trtx.frontend.dynamo_connection import AnswerReader, DynamoConnection

Rewrite = Callable[[str, bytes], bytes]
"""From path and body of a POST to the body with its prompt as token ids. Raises Unrenderable."""
ReadSlots = Callable[[], int]
"""Returns how many requests the workers compute at once, 0 if that is unknown. Raises OSError."""
ReadCalls = Callable[[str, bytes], CallRequest | None]
"""From path and rewritten body to the request for a streamed answer with tool calls; None: copy the answer."""

_THREADS = 2
_SLOTS_SECONDS = 0.5
_OVERLOADED = 529
_BACKLOG = 1024
_POLL_SECONDS = 0.01
_CONNECT_SECONDS = 5.0


class HttpProxy:
    """Listens on ``address`` in its own thread, and forwards each connection to Dynamo's port on loopback."""

    def __init__(
        self,
        address: tuple[str, int],
        inner_port: int,
        rewrite: Rewrite | None,
        *,
        paths: frozenset[str] = frozenset(),
        body_limit: int,
        tls: ssl.SSLContext | None = None,
        read_calls: ReadCalls | None = None,
        bounds: Bounds | None = None,
        read_slots: ReadSlots = lambda: 0,
        overload_status: int = _OVERLOADED,
        namespace: str = "",
        why_unavailable: Callable[[], str | None] = lambda: None,
        lacks_worker: Callable[[], bool] = lambda: False,
        drops_bypass_events: bool = False,
    ) -> None:
        """Rewrites POSTs to ``paths`` and refuses bodies of more than ``body_limit`` bytes.

        ``bounds``: limits of the queue and of a request's duration; ``overload_status``: the HTTP status for a request
        that exceeds the limit of the queue. The launcher of ``namespace`` is exempt. ``why_unavailable``: returns the
        text that replaces that of Dynamo's 503, or None. ``lacks_worker``: returns whether no worker that generates
        text is left, or raises OSError; called in a thread, after a 500. ``drops_bypass_events``: whether the router
        may leave prompts to decode workers, and so adds events to their streams. ``read_calls``: None if Dynamo has no
        tool call parser, so that all answers are copied.
        """
        self._address, self._inner_port, self._rewrite, self._tls = address, inner_port, rewrite, tls
        self._read_calls, self._read_slots = read_calls, read_slots
        self.why_unavailable, self._drops_bypass_events = why_unavailable, drops_bypass_events
        self._lacks_worker = lacks_worker
        self.admission, self.overload_status = AdmissionQueue(bounds or Bounds()), overload_status
        self.launcher = (LAUNCHER_HEADER, namespace.encode())
        self.paths, self.body_limit = paths, body_limit
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="prompt-maker")

    def start(self) -> None:
        """Binds the port, and listens once Dynamo does, so that clients can tell when the frontend is ready.

        Raises OSError if the port can't be bound.
        """
        family, kind, protocol, _, address = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        threading.Thread(target=self._run, args=(bound,), name="http-proxy", daemon=True).start()

    def _run(self, bound: socket.socket) -> None:
        import uvloop

        try:
            uvloop.run(self._serve(bound))
        except (
            Exception
        ) as error:  # for example, another process listened first; without its proxy a frontend is useless
            sys.stderr.write(f"trtx.frontend: the HTTP port {self._address[1]} can't be served ({error})\n")
            os._exit(1)

    async def _serve(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while not await self._dynamo_listens():
            await asyncio.sleep(_POLL_SECONDS)
        slots = loop.create_task(self._follow_slots()) if self.admission.bounds.has_queue else None
        server = await loop.create_server(lambda: ClientConnection(self), sock=bound, ssl=self._tls, backlog=_BACKLOG)
        await (server.serve_forever() if slots is None else asyncio.gather(server.serve_forever(), slots))

    async def _follow_slots(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # discovery can't be read now: keep the last number
                self.admission.set_slots(await asyncio.to_thread(self._read_slots))
            await asyncio.sleep(_SLOTS_SECONDS)

    async def _dynamo_listens(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self._inner_port)
        except OSError:
            return False
        writer.close()
        return True

    async def inner(self, client: AnswerReader) -> DynamoConnection:
        """Opens a connection to Dynamo's port on loopback. Raises OSError."""
        loop = asyncio.get_running_loop()
        drops = self._drops_bypass_events
        opening = loop.create_connection(
            lambda: DynamoConnection(client, drops_bypass_events=drops), "127.0.0.1", self._inner_port
        )
        _, protocol = await asyncio.wait_for(opening, _CONNECT_SECONDS)
        return protocol

    async def lacks_worker(self) -> bool:
        """Whether no worker that generates text is left; False if discovery can't be read now."""
        try:
            return await asyncio.to_thread(self._lacks_worker)
        except OSError:
            return False

    async def rewritten(self, path: str, body: bytes) -> tuple[bytes, CallRequest | None]:
        """Runs the rewrite in the thread pool. Raises Unrenderable.

        Returns the rewritten body, and what ``read_calls`` makes of it.
        """
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._both, path, body)

    def _both(self, path: str, body: bytes) -> tuple[bytes, CallRequest | None]:
        changed = body if self._rewrite is None else self._rewrite(path, body)
        return changed, None if self._read_calls is None else self._read_calls(path, changed)


def server_tls(certificate: Any, key: Any) -> ssl.SSLContext:
    """A TLS context with the certificate that Dynamo would present. Raises OSError or ssl.SSLError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["http/1.1"])
    return context
