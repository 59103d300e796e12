"""Two hosts on one machine: network namespaces joined by a veth pair, each with an address and a device of its own.

A thread that is inside of one makes its sockets there, and so do its threads and processes. All that is in a namespace
ends with it: a shell on a pipe removes both when this process closes the pipe, or is gone, by whatever signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from processes import until

_CLONE_NEWNET = 0x40000000
_NAMES = ("node1", "node2")
_DEVICE = "eth1"  # the same name on both, as on machines of one kind
# UCX knows the devices that /sys shows, and /sys shows those of the namespace that it was mounted in.
_EXECUTE = """
mount -t sysfs sysfs /sys || exit 1
while [ "$1" != -- ]; do mount -t tmpfs tmpfs "$1" || exit 1; shift; done
shift
exec "$@"
"""
_REMOVE = """
trap '' INT TERM HUP
cat >/dev/null
for namespace in "$1" "$2"; do
  for turn in 1 2 3 4 5 6 7 8 9 10; do
    pids=$(ip netns pids "$namespace" 2>/dev/null | grep -vx "$4")
    [ -n "$pids" ] || break
    kill -9 $pids 2>/dev/null
    sleep 0.1
  done
done
ip netns delete "$1"
ip netns delete "$2"
rm -rf "$3"
"""


@functools.cache
def lacking() -> str | None:
    """Why two hosts can't be made here; None where they can."""
    if shutil.which("ip") is None:
        return "hosts are network namespaces, which ip makes; install iproute2"
    if os.geteuid() != 0:
        return "hosts are network namespaces, which root alone can make; run as root"
    name = f"trtx-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode == 0:
        made = subprocess.run(
            ["ip", "-n", name, "link", "add", "one", "type", "veth", "peer", "name", "two"],
            capture_output=True,
            text=True,
        )
        subprocess.run(["ip", "netns", "delete", name], check=True)
    if made.returncode != 0:
        return f"no network namespace with a veth pair can be made: {made.stderr.strip()}"
    return None


@dataclass(frozen=True)
class Host:
    """One namespace. ``address`` is on ``device``; there is loopback besides, and no way out."""

    name: str
    namespace: str
    address: str
    device: str = _DEVICE

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread, and what it starts, is on this host."""
        inside_of = Path("/run/netns", self.namespace)
        with Path("/proc/thread-self/ns/net").open("rb") as before, inside_of.open("rb") as inside:
            _set_namespace(inside.fileno())
            try:
                yield
            finally:
                _set_namespace(before.fileno())

    @staticmethod
    def through(*hidden: Path) -> tuple[str, ...]:
        """What executes the command that follows it, with this host's /sys and nothing in the ``hidden`` directories.

        For a thread that is on the host. The process stays the same.
        """
        return ("unshare", "--mount", "sh", "-c", _EXECUTE, "sh", *map(os.fspath, hidden), "--")

    def received_bytes(self) -> int:
        """What came over the link since it was made."""
        return int(self._link()["stats64"]["rx"]["bytes"])

    def cut(self) -> None:
        """Takes the cable out at this host: its device goes down, the other's loses its carrier."""
        _ip("-n", self.namespace, "link", "set", self.device, "down")

    def lose_power(self) -> None:
        """Cuts the link and kills all that runs here. What is on disk stays."""
        self.cut()
        for pid in _ip("netns", "pids", self.namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def mend(self) -> None:
        _ip("-n", self.namespace, "link", "set", self.device, "up")

    def _link(self) -> dict[str, dict[str, dict[str, int]]]:
        (link,) = json.loads(_ip("-n", self.namespace, "-j", "-s", "link", "show", "dev", self.device))
        return link  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Hosts:
    """Two hosts, and a directory that goes with them."""

    first: Host
    second: Host
    directory: Path

    def __iter__(self) -> Iterator[Host]:
        yield self.first
        yield self.second


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """AssertionError where something of them is left at the end."""
    mark = f"trtx-{os.getpid()}-{os.urandom(2).hex()}"
    hosts = Hosts(
        *(Host(name, f"{mark}-{name}", f"10.77.0.{number}") for number, name in enumerate(_NAMES, 1)),
        directory=Path(tempfile.mkdtemp(prefix=f"{mark}-")),
    )
    remover = subprocess.Popen(
        ["sh", "-c", _REMOVE, "sh", hosts.first.namespace, hosts.second.namespace, hosts.directory, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _make(hosts)
        yield hosts
    finally:
        assert remover.stdin is not None and remover.stderr is not None
        remover.stdin.close()
        said = remover.stderr.read().decode()
        assert remover.wait(30) == 0, said
    assert not hosts.directory.exists()
    assert mark not in _ip("netns", "list")


def _make(hosts: Hosts) -> None:
    first, second = hosts
    for host in hosts:
        _ip("netns", "add", host.namespace)
    pair = ["type", "veth", "peer", "name", second.device, "netns", second.namespace]
    _ip("-n", first.namespace, "link", "add", first.device, *pair)
    for host in hosts:
        _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.device)
        for device in ("lo", host.device):
            _ip("-n", host.namespace, "link", "set", device, "up")
    for host in hosts:  # a link-local address that is still being looked for on the link can't be bound
        until("an IPv6 link-local address", lambda host=host: _has_ipv6(host), seconds=10, every=0.1)  # type: ignore[misc]


def _has_ipv6(host: Host) -> bool:
    text = _ip("-n", host.namespace, "-6", "address", "show", "dev", host.device, "scope", "link")
    return "fe80::" in text and "tentative" not in text


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def _set_namespace(descriptor: int) -> None:
    """``os.setns`` is Python 3.12's."""
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
