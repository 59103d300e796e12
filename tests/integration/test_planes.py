"""Frontend and workers over a real etcd and a real NATS on loopback: what trtx sees of them there, and takes out."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from processes import HTTP, Topology, free_first_port, free_port, topology, until
from services import EtcdService, Service, certificates, etcd, nats
from topology_clients import PACED, trtx_serve, wait_until

from trtx.checkpoint import resolve_checkpoint
from trtx.engine import worker_facts
from trtx.errors import UsageError
from trtx.experiment import Attach
from trtx.experiment.deployment import ask_deployment
from trtx.launch.discovery import owner
from trtx.launch.processes import members
from trtx.planes.credentials import EtcdAuth
from trtx.planes.etcd import Etcd
from trtx.planes.etcd_registry import EtcdRegistry, namespaces
from trtx.planes.registry import RegistryUnknown
from trtx.planes.watched import WatchedRegistry

_NAMESPACE = "trtx-planes"
_TTL_S = 120  # longer than any wait of these tests: what is gone before was taken out


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EtcdService, Service]]:
    directory = tmp_path_factory.mktemp("services")
    certificates(directory, ["server"])
    tls = f"tls {{cert_file: '{directory / 'server.pem'}', key_file: '{directory / 'server-key.pem'}'}}"
    with (
        pytest.MonkeyPatch.context() as patch,
        etcd(directory / "etcd") as first,
        nats(directory / "nats", tls) as second,
    ):
        patch.setenv("SSL_CERT_FILE", str(directory / "ca.pem"))
        yield first, second


def environment(services: tuple[EtcdService, Service]) -> dict[str, str]:
    return {
        "DYN_NAMESPACE": _NAMESPACE,
        "DYN_DISCOVERY_BACKEND": "etcd",
        "ETCD_ENDPOINTS": services[0].url,
        "ETCD_LEASE_TTL": str(_TTL_S),
        "DYN_EVENT_PLANE": "nats",
        "NATS_SERVER": f"tls://127.0.0.1:{services[1].port}",
    }


def test_a_dead_worker_leaves_the_routing_long_before_its_lease_and_what_lives_is_told(
    services: tuple[EtcdService, Service], tmp_path: Path
) -> None:
    model = resolve_checkpoint("synthetic:tiny").path
    with topology(tmp_path, model) as running, Etcd([services[0].url]) as client:
        registry = EtcdRegistry(client, _NAMESPACE, lease_ttl_s=_TTL_S)
        assert registry.instances() == []
        assert registry.worker_ids() == set()
        running.extra_environment = environment(services)
        running.start_frontend("--migration-limit", "3")
        first, second = running.start_worker("agg-0"), running.start_worker("agg-1")
        running.wait_ready(aggregated=2)

        ids = {child.name: child.status()["worker_id"] for child in (first, second)}
        assert registry.worker_ids() == set(ids.values())
        assert {instance.host for instance in registry.instances()} == {"127.0.0.1"}
        assert owner(registry, first.process.pid, set()) == ids["agg-0"]
        assert owner(registry, first.process.pid, {ids["agg-0"]}) is None
        assert namespaces(client) == {_NAMESPACE}
        renewed = registry.renewed_at(ids["agg-0"])
        assert renewed is not None
        assert registry.records_live_s == _TTL_S
        assert _published(running) == {"agg-0", "agg-1"}
        _ask_behind_another_frontend(running, services[0].url)

        watched = WatchedRegistry(EtcdRegistry(Etcd([services[0].url]), _NAMESPACE, lease_ttl_s=_TTL_S))
        try:
            assert until("the thread has looked", lambda: _known(watched)) == set(ids.values())
            os.kill(second.process.pid, signal.SIGKILL)
            second.process.wait()
            running.children.remove(second)
            watched.remove(ids["agg-1"])
            assert watched.worker_ids() == {ids["agg-0"]}  # to whoever asked, at once
            running.wait_ready(aggregated=1)
            until("its records are gone", lambda: registry.worker_ids() == {ids["agg-0"]})
            assert client.lease(ids["agg-1"]) is None
        finally:
            watched.close()
        assert _published(running) == {"agg-0"}


def _known(registry: WatchedRegistry) -> set[int] | None:
    try:
        return registry.worker_ids()
    except OSError:
        return None


def _ask_behind_another_frontend(running: Topology, etcd_url: str) -> None:
    """Dynamo's own shows no runtime data: etcd has it, and one of no such topology is no answer."""
    port = free_port()
    plain = running.spawn("plain", ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)])
    url = f"http://127.0.0.1:{port}"

    def counted() -> bool:
        try:
            return ask_deployment(Attach(url=url)).workers == {"agg": 2}
        except UsageError:  # it does not listen, or lists no model yet
            return False

    until("both workers are counted", counted)
    assert ask_deployment(Attach(url=url)).versions is None
    found = ask_deployment(Attach(url=url, etcd=(etcd_url,)))
    assert (found.engine, found.workers, found.gpu_names, found.gpu_count) == ("paced", {"agg": 2}, (), 0)
    assert found.versions is not None and found.versions["ai-dynamo"]
    with pytest.raises(UsageError, match="--etcd can't be queried .* Connection refused"):
        ask_deployment(Attach(url=url, etcd=(f"http://127.0.0.1:{free_port()}",)))
    with etcd(running.directory / "another") as other, pytest.raises(UsageError, match="has no worker of tiny"):
        ask_deployment(Attach(url=url, etcd=(other.url,)))
    plain.end()
    running.children.remove(plain)


def _published(running: Topology) -> set[str]:
    found = worker_facts.of_body(HTTP.get(f"{running.url}{worker_facts.PATH}", timeout=10).content)
    assert found is not None
    return {worker.facts.name for worker in found}


_PASSWORD = "a-word-that-stands-nowhere-else"


def test_secrets_are_in_the_environment_of_the_children_and_nowhere_else(tmp_path: Path) -> None:
    """And a launcher that is killed leaves nobody in etcd: its guardian revokes what its workers held."""
    certificates(tmp_path)
    (tmp_path / "password").write_text(f"{_PASSWORD}\n")
    (tmp_path / "password").chmod(0o640)
    (tmp_path / "client-key.pem").chmod(0o600)
    flags = ["--cert-file", "server.pem", "--key-file", "server-key.pem", "--trusted-ca-file", "ca.pem"]
    flags = [str(tmp_path / flag) if flag.endswith(".pem") else flag for flag in flags]
    auth = EtcdAuth(tmp_path / "ca.pem", tmp_path / "client.pem", tmp_path / "client-key.pem")
    login = f"authorization {{user: trtx, password: {_PASSWORD}}}"
    with (
        etcd(tmp_path / "etcd", *flags, "--client-cert-auth", scheme="https") as first,
        nats(tmp_path / "nats", login) as second,
        Etcd([first.url], auth.read()) as client,
    ):
        hosts = {
            "name": f"secret-{os.getpid()}",
            "etcd": [first.url],
            "etcd_auth": {"ca": "ca.pem", "certificate": "client.pem", "key": "client-key.pem"},
            "nats": f"nats://127.0.0.1:{second.port}",
            "nats_auth": {"username": "trtx", "password_file": "password"},
            "lease_ttl_s": _TTL_S,
            "hosts": [{"name": "here", "address": "127.0.0.1", "roles": {"agg": 2}, "first_port": free_first_port()}],
        }
        (tmp_path / "hosts.yaml").write_text(yaml.safe_dump(hosts))
        arguments = ("--hosts", str(tmp_path / "hosts.yaml"), "--port", str(free_port()), *PACED)
        with trtx_serve(*arguments) as serve:
            plan = serve.wait_ready()
            (warned,) = re.findall(r"warning: other users can read or change (.*)", serve.text())
            assert "client-key" not in warned and warned.endswith(f"chmod 600 {tmp_path / 'password'}")
            registry = EtcdRegistry(client, plan.namespace, lease_ttl_s=_TTL_S)
            assert len(registry.worker_ids()) == 2
            # Of what the key and the password are, no part may stand anywhere.
            secrets = {_PASSWORD, *(tmp_path / "client-key.pem").read_text().split("\n")[1:-2]}
            files = [path for path in (*serve.run_parent.rglob("*"), *plan.scratch_dir.rglob("*")) if path.is_file()]
            assert [path for path in files if path.name == "plan.json"]
            assert [path for path in files if path.suffix == ".log"]
            for path in (*files, serve.output):
                assert not [one for one in secrets if one in path.read_text(errors="replace")], path
            own = members(plan.marker, ())
            assert len(own) >= 3
            for process in Path("/proc").glob("[0-9]*"):
                command = _read(process / "cmdline")
                assert not [one for one in secrets if one in command], command
            with_secrets = {pid for pid in own if _PASSWORD in _read(Path("/proc", str(pid), "environ"))}
            assert with_secrets == own
            published = client.range("trtx/", is_prefix=True)
            assert published
            assert not [entry for entry in published if any(one.encode() in entry.value for one in secrets)]

            os.kill(serve.pid_of("agg-0"), signal.SIGSTOP)  # or it would leave by itself when it is told to end
            serve.process.kill()
            serve.process.wait()
            wait_until(lambda: registry.worker_ids() == set(), 60, "no worker is registered")
            wait_until(lambda: not members(plan.marker, ()), 60, "no process is left")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended since
        return ""


def test_one_that_cannot_be_taken_out_is_told_once_for_each_reason_and_tried_on(
    services: tuple[EtcdService, Service],
) -> None:
    class Refused(EtcdRegistry):
        """As with a user who may read alone."""

        why = "permission denied"

        def remove(self, worker_id: int) -> None:
            if self.why:
                raise RegistryUnknown(self.why)
            super().remove(worker_id)

    with Etcd([services[0].url]) as client:
        lease, told = client.grant(_TTL_S), list[str]()
        registry = Refused(Etcd([services[0].url]), "nobodys", lease_ttl_s=_TTL_S)
        watched = WatchedRegistry(registry, told.append)
        try:
            watched.remove(lease)
            until("it is told", lambda: len(told) == 1)
            assert told == [
                "the router still sends requests to a dead worker, whose record can't be removed: permission denied"
            ]
            registry.why = "out of space"
            until("the other reason too", lambda: len(told) == 2)
            registry.why = ""
            until("it is taken out", lambda: client.lease(lease) is None)
            assert len(told) == 2
        finally:
            watched.close()


@pytest.mark.proof
def test_a_worker_that_exits_0_unasked_is_started_again_and_etcd_may_go_and_come(
    services: tuple[EtcdService, Service], tmp_path: Path
) -> None:
    hosts = {
        "name": f"deaths-{os.getpid()}",
        "etcd": [f"http://127.0.0.1:{free_port()}", services[0].url],  # of two members one is down
        "nats": f"tls://127.0.0.1:{services[1].port}",
        "lease_ttl_s": _TTL_S,
        "hosts": [{"name": "here", "address": "127.0.0.1", "roles": {"agg": 2}, "first_port": free_first_port()}],
    }
    (tmp_path / "hosts.yaml").write_text(yaml.safe_dump(hosts))
    arguments = ("--hosts", str(tmp_path / "hosts.yaml"), "--port", str(free_port()), *PACED)
    with Etcd([services[0].url]) as client:
        # As a share leaves it whose host lost its power: at this host's address, where nobody listens.
        cut_off, namespace = client.grant(_TTL_S), f"trtx-{hosts['name']}"
        record = {"endpoint": "generate", "component": "backend", "namespace": namespace, "instance_id": cut_off}
        record |= {"type": "Endpoint", "transport": {"tcp": f"127.0.0.1:{free_port()}/{cut_off:x}/generate"}}
        key = f"v1/instances/{namespace}/backend/generate/{cut_off:x}"
        client.put(key, json.dumps(record).encode(), lease=cut_off)
        _go_through_deaths(client, arguments, services)
        assert client.get(key) is None


def _go_through_deaths(client: Etcd, arguments: tuple[str, ...], services: tuple[EtcdService, Service]) -> None:
    with trtx_serve(*arguments) as serve:
        plan = serve.wait_ready()
        assert "1 workers of an earlier share that was killed here were still registered" in serve.text()
        registry = EtcdRegistry(client, plan.namespace, lease_ttl_s=_TTL_S)
        before = registry.worker_ids()
        os.kill(serve.pid_of("agg-0"), signal.SIGTERM)  # drains and ends with 0, by nobody's wish
        wait_until(lambda: "agg-0 exited 0" in serve.text(), 60, serve.text())
        wait_until(lambda: "whole again" in serve.text(), 60, serve.text())
        after = registry.worker_ids()
        assert len(after) == 2
        assert len(after & before) == 1

        services[0].end()
        wait_until(lambda: "the registered workers are unknown" in serve.text(), 60, serve.text())
        os.kill(serve.pid_of("agg-1"), signal.SIGKILL)  # what it held can't be revoked now
        wait_until(lambda: "agg-1 was killed by SIGKILL" in serve.text(), 60, serve.text())
        services[0].start()
        wait_until(lambda: "the registered workers are known again" in serve.text(), 60, serve.text())
        wait_until(lambda: len(re.findall("whole again", serve.text())) == 2, 90, serve.text())
        lived = after & registry.worker_ids()
        assert len(lived) == 1  # the dead one went when etcd came, long before its lease ended
