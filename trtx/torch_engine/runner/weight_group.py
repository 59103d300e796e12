"""The engines of a :class:`~trtx.torch_engine.llm_args.WeightGroup`: how they find and answer each other.

Each engine that has weights listens on a Unix socket in the group's directory, and gives every engine that asks the
descriptors of their memory. The kernel and the driver free memory with its last mapping and descriptor, so no engine
owns it: any of them may be killed, and a restarted one maps the weights of the others. One engine at a time starts, so
exactly one of them loads the checkpoint, and each measures the memory that the others left.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trtx.errors import UsageError
from trtx.torch_engine.channel import Channel
from trtx.torch_engine.llm_args import WeightGroup
from trtx.torch_engine.runner.weight_offer import WeightOffer

log = logging.getLogger(__name__)

_PATIENCE_S = 10.0
"""How long an engine waits for another one's message; a stopped process counts as gone."""
_DESCRIPTORS_AT_ONCE = 64  # Linux allows 253 in one message


class _Wanted(msgspec.Struct, frozen=True, tag="wanted", array_like=True):
    """The asking engine takes the weights."""


@contextmanager
def sole_start(group: WeightGroup) -> Iterator[None]:
    """Waits until no other engine of the group starts. The kernel ends the wait of others if this process is killed.

    Raises UsageError for a directory that can't be used or that other users may write to, and for a name whose engine
    runs.
    """
    directory = Path(group.directory)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(directory)
        lock = (directory / "lock").open("a")
    except OSError as error:
        raise UsageError(
            f"{directory} can't be used to share weights ({error.strerror}); give a directory that can be written"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (peer := _ask(directory / f"{group.name}.sock")) is not None:
            peer.connection.close()
            raise UsageError(
                f"an engine with the name {group.name} shares its weights in {directory} already; give each engine of "
                "the group a name of its own"
            )
        yield


def _check_private(directory: Path) -> None:
    """Raises UsageError if another user could place weights in ``directory``."""
    found = directory.stat()
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            f"other users may write to {directory}, and an engine uses the weights that it finds there; give a "
            "directory that only you may write to"
        )


@dataclass(frozen=True, slots=True)
class WeightPeer:
    """Another engine of the group that has weights."""

    name: str
    offer: WeightOffer
    connection: socket.socket

    def descriptors(self) -> list[int] | None:
        """Returns the descriptors of the regions, which then belong to the caller; None if the engine has ended."""
        found: list[int] = []
        try:
            Channel[WeightOffer](self.connection, WeightOffer).send(_Wanted())
            while len(found) < len(self.offer.region_bytes):
                data, received, _, _ = socket.recv_fds(
                    self.connection, 1, _DESCRIPTORS_AT_ONCE, socket.MSG_CMSG_CLOEXEC
                )
                found += received
                if not data:
                    raise OSError("the connection has ended")
        except OSError:
            for descriptor in found:
                os.close(descriptor)
            return None
        return found


@contextmanager
def weight_peers(group: WeightGroup) -> Iterator[list[WeightPeer]]:
    """Yields the engines of the group that answer, connected. Call it within :func:`sole_start`."""
    peers: list[WeightPeer] = []
    try:
        for path in sorted(Path(group.directory).glob("*.sock")):
            if path.stem != group.name and (peer := _ask(path)) is not None:
                peers.append(peer)
        yield peers
    finally:
        for peer in peers:
            peer.connection.close()


def _ask(path: Path) -> WeightPeer | None:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_PATIENCE_S)
    try:
        with _short(path) as address:
            connection.connect(address)
        offer = Channel[WeightOffer](connection, WeightOffer).receive()
    except (OSError, msgspec.ValidationError):  # the socket belongs to a killed engine, or to another program
        connection.close()
        return None
    if offer is None:
        log.warning("the weights of %s are not used, because it is stopped or has just ended", path.stem)
        connection.close()
        return None
    return WeightPeer(path.stem, offer, connection)


class WeightServer:
    """Gives the descriptors of an engine's weights to the other engines of its group, in a thread of its own."""

    def __init__(self, group: WeightGroup, offer: WeightOffer, descriptors: Sequence[int]) -> None:
        """``descriptors``: of the regions of ``offer``; they must stay open until :meth:`close`. Raises UsageError."""
        self._offer = offer
        self._descriptors = list(descriptors)
        self._listener = socket.socket(socket.AF_UNIX)
        self._path = Path(group.directory) / f"{group.name}.sock"
        try:
            self._path.unlink(missing_ok=True)  # of this engine before it was killed
            with _short(self._path) as address:
                self._listener.bind(address)
        except OSError as error:
            raise UsageError(
                f"{self._path} can't be made to share weights ({error.strerror}); give a directory with room"
            ) from error
        self._listener.listen()
        threading.Thread(target=self._serve, name="shared-weights", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with connection:
                connection.settimeout(_PATIENCE_S)
                try:
                    self._answer(connection)
                except (OSError, msgspec.ValidationError) as error:
                    log.warning("another engine could not be given the weights: %s", error)

    def _answer(self, connection: socket.socket) -> None:
        channel = Channel[_Wanted](connection, _Wanted)
        channel.send(self._offer)
        if channel.receive() is None:
            return
        for begin in range(0, len(self._descriptors), _DESCRIPTORS_AT_ONCE):
            socket.send_fds(connection, [b"d"], self._descriptors[begin : begin + _DESCRIPTORS_AT_ONCE])

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread's accept
        self._listener.close()


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yields a name of ``path`` that is short enough for the address of a socket, which has at most 107 bytes."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
