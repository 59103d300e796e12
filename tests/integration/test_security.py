"""docs/security.md tried claim by claim on loopback, on what really runs. Its table names the test of each claim."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from certificates import Pair, make
from topology_clients import PACED, trtx_serve

from trtx.topology import Plan

pytestmark = pytest.mark.slow
SECRETS = {"OPENAI_API_KEY": "hunter2-openai", "HF_TOKEN": "hunter2-hub", "NATS_AUTH_PASSWORD": "hunter2-nats"}


@dataclass(frozen=True)
class Served:
    plan: Plan
    launcher: psutil.Process
    pair: Pair

    @property
    def processes(self) -> list[psutil.Process]:
        """All that the launcher started."""
        return self.launcher.children(recursive=True)

    def ask(self, method: str, path: str) -> httpx.Response:
        with httpx.Client(base_url=self.plan.url, verify=False, trust_env=False, timeout=30) as client:
            return client.request(method, path, json={} if method == "POST" else None)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    pair = make(tmp_path_factory.mktemp("tls"), "own", ["localhost"])
    pair.key.chmod(0o600)
    words = ("--tls-cert", str(pair.certificate), "--tls-key", str(pair.key))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        with trtx_serve(*PACED, "--mode", "disagg", "--router-mode", "kv", *words) as serve:
            yield Served(serve.wait_ready(), psutil.Process(serve.process.pid), pair)


def test_every_port_of_one_machine_is_on_loopback(served: Served) -> None:
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for process in served.processes
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {ip for ip, _ in listening} <= {"127.0.0.1", "::1"}
    assert {port for _, port in listening} >= {served.plan.port, *served.plan.internal_ports}


def test_secrets_of_who_serves_reach_no_process_no_command_line_and_no_file(served: Served) -> None:
    key = served.pair.key.read_text()
    for process in served.processes:
        environment, words = process.environ(), " ".join(process.cmdline())
        told = [name for name, value in environment.items() if any(one in value for one in SECRETS.values())]
        assert told == [], f"{words[:80]} has {told}"
        assert not any(one in words for one in (*SECRETS.values(), key))
    for directory in (served.plan.run_dir, served.plan.scratch_dir):
        for path in directory.rglob("*"):
            text = path.read_text(errors="replace") if path.is_file() else ""
            assert not any(one in text for one in (*SECRETS.values(), key)), path


def test_what_processes_leave_for_each_other_is_their_users_alone(served: Served) -> None:
    assert stat.S_IMODE(served.plan.scratch_dir.stat().st_mode) == 0o700


@pytest.mark.parametrize("path", ["/metrics", "/health", "/live", "/trtx/workers", "/v1/models"])
def test_who_reaches_the_http_port_reads_all_of_it_without_a_key(served: Served, path: str) -> None:
    assert served.ask("GET", path).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/clear_kv_blocks"), ("POST", "/busy_threshold"), ("GET", "/busy_threshold")]
)
def test_routes_that_change_a_frontend_are_off(served: Served, method: str, path: str) -> None:
    assert served.ask(method, path).status_code == 404
    assert path not in served.ask("GET", "/openapi.json").json()["paths"]


def test_the_http_port_speaks_nothing_but_tls_and_the_system_port_nothing_but_clear_text(served: Served) -> None:
    plain = f"http://127.0.0.1:{served.plan.port}/v1/models"
    with pytest.raises(httpx.TransportError):
        httpx.get(plain, trust_env=False, timeout=10)
    for worker in served.plan.workers:
        url = f"127.0.0.1:{worker.system_port}/metrics"
        assert httpx.get(f"http://{url}", trust_env=False, timeout=10).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"https://{url}", trust_env=False, verify=False, timeout=10)


def test_the_plan_has_the_path_of_the_key_and_not_the_key(served: Served) -> None:
    (plan,) = served.plan.run_dir.rglob("plan.json")
    text = Path(plan).read_text()
    assert str(served.pair.key) in text and served.pair.key.read_text()[40:80] not in text
