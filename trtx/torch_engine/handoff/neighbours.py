"""Local peers: the processes on this host whose memory this process reads directly, or that read this one's.

Engines read each other's KV pools, and the arenas in which encoders keep embeddings. Each process listens on an
abstract Unix socket, which has no file, belongs to a network namespace, and disappears with the process, however that
ends. A reader keeps a connection to each process that it reads from. Over the connection, the exporter describes how to
reach its pool, and the reader names the leases that it no longer needs. When the connection ends, each side knows that
the other has gone.

One thread handles all connections, so that a peer's death is noticed even while the engine sleeps. The reader must then
close the dead peer's pool: while it is open, the GPU memory may stay allocated, and the process that replaces the peer
on that GPU would find too little memory.
"""

from __future__ import annotations

import logging
import os
import select
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from trtx.torch_engine.handoff.codec import DirectOffer
from trtx.torch_engine.handoff.memory import MemoryUnreachable, SharedMemory

log = logging.getLogger(__name__)

_MESSAGE_BYTES = 65536
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class Greeting(msgspec.Struct, tag="greeting", array_like=True):
    """The exporter's first message on a connection."""

    offer: DirectOffer
    layout: bytes


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """The reader's first message: its own address, because its pool can be read as well."""

    address: str


class Release(msgspec.Struct, tag="release", array_like=True):
    """The reader no longer needs the lease."""

    lease_id: int


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Greeting | Hello | Release)


@dataclass(slots=True, eq=False)
class Neighbour:
    """A local peer that this process reads from. Fields change under the lock of :class:`Neighbours`."""

    address: str
    connection: socket.socket
    pid: int
    pool: Any = None  # as PoolMemory.open returns it
    problem: str = ""  # why the pool cannot be opened
    is_gone: bool = False
    copies: int = 0  # in flight


def boot_id() -> str:
    """The kernel's boot id: constant until reboot, and the same in all containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Neighbours:
    """All local peers.

    Call ``find``, and the methods that take a :class:`Neighbour`, from the engine's thread. Another thread handles the
    connections.
    """

    def __init__(
        self,
        memory: SharedMemory,
        layout: bytes,
        group: str | None,
        released: Callable[[int], None],
        *,
        what: str = "KV pool",
        prefix: str = "trtx-kv-",
        is_read: bool = True,
    ) -> None:
        """``layout``: the block layout. The pool of a peer with another layout is opened only when a read needs it.

        ``group``: engines with the same group find each other at start and open each other's pools before the first
        read. None: a pool is opened by the first read from it. ``released``: called with the id of each lease that a
        reader releases. ``what``: the pool's name in logs. ``prefix``: the first part of the socket's name.
        ``is_read``: False if this process has no pool and only reads.
        """
        self._memory = memory
        self._released = released
        self._what = what
        self._is_read = is_read
        self._lock = threading.Lock()
        self._known: dict[str, Neighbour] = {}  # dead peers stay here, so that no read waits for them
        family = prefix + (blake2b(group.encode(), digest_size=8).hexdigest() if group else "alone") + "-"
        self.offer = DirectOffer(
            host=boot_id(),
            address=family + os.urandom(8).hex(),
            memory=memory.kind,
            handle=memory.handle,
            offset=memory.offset,
        )
        self._greeting = Greeting(self.offer, layout)
        self._selector = selectors.DefaultSelector()
        self._waker, wakes = socket.socketpair()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self.offer.address)
        self._listener.listen(128)
        self._selector.register(wakes, selectors.EVENT_READ, None)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        if group is not None:
            with self._lock:
                for address in _listening(family):
                    if address != self.offer.address:
                        self._connect(address)
        self._thread = threading.Thread(target=self._run, name="kv-neighbours", daemon=True)
        self._thread.start()

    def find(self, offer: DirectOffer) -> Neighbour | None:
        """Returns the peer that made the offer, with its pool open, or None if it can't be reached directly.

        The peer may have gone (``is_gone``). Its pool stays open until the caller calls ``leave``.
        """
        with self._lock:
            neighbour = self._known.get(offer.address) or self._connect(offer.address)
            if neighbour is None:
                return None
            if not neighbour.is_gone:
                self._open(neighbour, offer)
                if neighbour.problem:
                    return None
            neighbour.copies += 1
            return neighbour

    def leave(self, neighbour: Neighbour) -> None:
        """Ends the copy that ``find`` counted, whether it ran or was never started."""
        with self._lock:
            neighbour.copies -= 1
            if neighbour.is_gone:
                self._shut(neighbour)

    def is_alive(self, neighbour: Neighbour) -> bool:
        """Asks the kernel whether the peer is alive, because the thread may not have noticed its end yet."""
        if neighbour.is_gone:
            return False
        asked = select.poll()
        try:
            asked.register(neighbour.connection, 0)  # a hang-up is reported for any event mask
        except (OSError, ValueError):
            return False
        return not asked.poll(0)

    def tell_released(self, address: str, lease_id: int) -> bool:
        """Tells a peer that its lease is released. Returns False if the peer is gone.

        A frozen peer gets the message when it runs again, unless hundreds of messages are already waiting for it.
        """
        with self._lock:
            neighbour = self._known.get(address) or self._connect(address)
        if neighbour is None or neighbour.is_gone:
            return False
        try:
            neighbour.connection.send(_encode(Release(lease_id)))
        except BlockingIOError:  # hundreds of unread messages: the peer is frozen, its leases expire
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Closes all pools; no copy may be in flight. Returns once the thread has ended."""
        self._waker.close()
        self._thread.join()
        for neighbour in self._known.values():
            neighbour.is_gone = True
            self._shut(neighbour)

    # --- under the lock ---

    def _connect(self, address: str) -> Neighbour | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        try:
            connection.connect("\0" + address)
            pid, uid = _credentials(connection)
            if uid != os.geteuid():
                raise PermissionError(f"it belongs to user {uid}")
            if self._is_read:
                connection.send(_encode(Hello(self.offer.address)))
        except OSError as error:
            log.info("no direct transport to the %s at %s: %s", self._what, address, error)
            connection.close()
            return None
        neighbour = self._known[address] = Neighbour(address, connection, pid)
        # epoll accepts changes from any thread, and wakes up for messages on the new connection.
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(neighbour))
        return neighbour

    def _open(self, neighbour: Neighbour, offer: DirectOffer) -> None:
        if neighbour.pool is not None or neighbour.problem:
            return
        try:
            neighbour.pool = self._memory.open(offer, neighbour.pid)
        except MemoryUnreachable as error:
            neighbour.problem = str(error) or "it cannot be opened"
            log.warning("the %s at %s is not read directly: %s", self._what, neighbour.address, neighbour.problem)

    def _shut(self, neighbour: Neighbour) -> None:
        if neighbour.copies == 0 and neighbour.pool is not None:
            self._memory.shut(neighbour.pool)
            neighbour.pool = None

    # --- the thread ---

    def _run(self) -> None:
        self._memory.adopt_thread()
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._end()
                    return
                try:
                    key.data()
                except Exception:  # an error of one peer must not end the thread
                    log.exception("a neighbour's connection ends")
                    self._drop(key.fileobj)

    def _end(self) -> None:
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the peer has gone already, or no file descriptors are left
            return
        connection.setblocking(False)
        with suppress(OSError):
            if _credentials(connection)[1] == os.geteuid():
                connection.send(_encode(self._greeting))
                self._selector.register(connection, selectors.EVENT_READ, lambda: self._serve(connection))
                return
        connection.close()

    def _serve(self, connection: socket.socket) -> None:
        """Handles a message from a reader."""
        message = self._receive(connection)
        if isinstance(message, Release):
            self._released(message.lease_id)
        elif isinstance(message, Hello):
            with self._lock:
                if message.address not in self._known and message.address != self.offer.address:
                    self._connect(message.address)
        else:
            self._drop(connection)

    def _hear(self, neighbour: Neighbour) -> None:
        """Handles a message from a peer that this process reads from, or the end of its connection."""
        message = self._receive(neighbour.connection)
        with self._lock:
            if isinstance(message, Greeting):
                ours = self._greeting
                if (message.layout, message.offer.memory) == (ours.layout, ours.offer.memory):
                    self._open(neighbour, message.offer)
                return
            neighbour.is_gone = True
            self._shut(neighbour)
        self._drop(neighbour.connection)

    def _receive(self, connection: socket.socket) -> Greeting | Hello | Release | None:
        """Returns the next message; None if the other end has closed or sent no valid message."""
        try:
            received = connection.recv(_MESSAGE_BYTES)
            return _decoder.decode(received) if received else None
        except (OSError, msgspec.MsgspecError) as error:
            log.info("the connection to a local peer ended: %s", error)
            return None

    def _drop(self, connection: Any) -> None:
        self._selector.unregister(connection)
        connection.close()


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Returns (pid, uid) of the process at the other end, in this namespace's numbering."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def _listening(family: str) -> list[str]:
    """Names of the abstract sockets in this network namespace that begin with ``family``."""
    try:
        table = Path("/proc/net/unix").read_text()
    except OSError:
        return []
    names = (line.rpartition(" ")[2] for line in table.splitlines())
    return sorted({name[1:] for name in names if name.startswith("@" + family)})
