"""etcd and NATS on one host, at their usual ports: killed and come again with what they keep on disk."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from namespaces import Host
from processes import until
from services import Service, needs

ETCD_PORT = 2379
ETCD_PEER_PORT = 2380
NATS_PORT = 4222
# Above a prompt of 128 Ki tokens: with the server's own 1 MiB one that is longer costs its worker (Dynamo 1.4.2).
MAX_PAYLOAD_BYTES = 8 << 20


@dataclass
class HostServer(Service):
    host: Host = field(kw_only=True)

    def start(self) -> None:
        with self.host.entered():
            super().start()

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@dataclass
class HostEtcd(HostServer):
    @property
    def url(self) -> str:
        return f"http://{self.host.address}:{self.port}"

    def start(self) -> None:
        super().start()
        with self.host.entered():
            until("a healthy etcd", self._is_healthy, every=0.05)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(json.load(answer)["health"] == "true")
        except OSError:
            return False


def etcd(host: Host, directory: Path) -> HostEtcd:
    directory.mkdir()
    client, peer = f"http://{host.address}:{ETCD_PORT}", f"http://{host.address}:{ETCD_PEER_PORT}"
    argv = [needs("etcd", "etcd-server"), "--data-dir", os.fspath(directory / "data"), "--log-level", "warn"]
    argv += ["--listen-client-urls", client, "--advertise-client-urls", client]
    argv += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    return HostEtcd(argv, ETCD_PORT, directory / "log", hosts=(host.address,), host=host)


def nats(host: Host, directory: Path) -> HostServer:
    directory.mkdir()
    config = directory / "nats.conf"
    config.write_text(f"host: {host.address}\nport: {NATS_PORT}\nmax_payload: {MAX_PAYLOAD_BYTES}\n", encoding="utf-8")
    argv = [needs("nats-server", "nats-server"), "-c", os.fspath(config)]
    return HostServer(argv, NATS_PORT, directory / "log", hosts=(host.address,), host=host)
