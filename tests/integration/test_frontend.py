"""``python -m trtx.frontend`` as a process: what it listens on, what it refuses, how it ends."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

import httpx
import pytest
from processes import HTTP, Child, Topology, topology, until

from trtx.checkpoint import resolve_checkpoint


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_checkpoint("synthetic:tiny").path


def listening(child: Child) -> set[str]:
    """``address:port`` of every TCP socket on which ``child`` listens."""
    lines = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[3] for line in lines if re.search(rf"pid={child.process.pid}\b", line)}


def is_live(running: Topology) -> bool:
    try:
        return HTTP.get(f"{running.url}/live", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_it_listens_on_loopback_alone_by_default_and_ends_cleanly_at_sigterm(model: Path, tmp_path: Path) -> None:
    with topology(tmp_path, model) as running:
        frontend = running.start_frontend("--router-mode", "kv")
        until("live", lambda: is_live(running))
        addresses = listening(frontend)
        assert f"127.0.0.1:{running.port}" in addresses
        assert {f"127.0.0.1:{address.rsplit(':', 1)[1]}" for address in running.broker} <= addresses
        assert all(address.startswith(("127.0.0.1:", "[::1]:")) for address in addresses), addresses
        assert frontend.end() == 0


def test_an_open_host_opens_the_http_port_alone(model: Path, tmp_path: Path) -> None:
    with topology(tmp_path, model) as running:
        frontend = running.start_frontend("--http-host", "0.0.0.0")
        until("live", lambda: is_live(running))
        beyond = {a for a in listening(frontend) if not a.startswith(("127.0.0.1:", "[::1]:"))}
        assert beyond == {f"0.0.0.0:{running.port}"}


def test_without_broker_flags_there_is_no_broker(model: Path, tmp_path: Path) -> None:
    with topology(tmp_path, model) as running:
        frontend = running.spawn("frontend", ["-m", "trtx.frontend", "--http-port", str(running.port)])
        until("live", lambda: is_live(running))
        brokers = {f"127.0.0.1:{address.rsplit(':', 1)[1]}" for address in running.broker}
        assert not brokers & listening(frontend)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--broker-xsub", "tcp://127.0.0.1:5557"], "only one of --broker-xsub and --broker-xpub"),
        (
            ["--broker-xsub", "tcp://0.0.0.0:5557", "--broker-xpub", "tcp://127.0.0.1:5558"],
            "expected a loopback address",
        ),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_wrong_flags_end_it_with_a_sentence(flags: list[str], said: str, model: Path, tmp_path: Path) -> None:
    running = Topology(tmp_path, model)
    frontend = running.spawn("frontend", ["-m", "trtx.frontend", "--http-port", str(running.port), *flags])
    assert frontend.process.wait(30) != 0
    assert said in frontend.log().splitlines()[-1]


def test_a_broker_port_in_use_is_exit_2(model: Path, tmp_path: Path) -> None:
    running = Topology(tmp_path, model)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        running.broker = (f"tcp://127.0.0.1:{taken.getsockname()[1]}", running.broker[1])
        frontend = running.start_frontend()
        assert frontend.process.wait(30) == 2
    assert "can't be bound" in frontend.log()
