"""What the launcher reads and hands on: readiness, ports, environment, discovery records, the machine."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback import Handler, serving

from trtx.errors import UsageError
from trtx.launch.discovery import owner
from trtx.launch.environment import child_environment
from trtx.launch.machine import probe
from trtx.launch.ports import PortHolder
from trtx.launch.readiness import ask_readiness, complete, parse_readiness
from trtx.planes.file_registry import FileRegistry


def answer(ready: bool, **workers: int) -> dict[str, Any]:
    types = {name: {"workers": count, "needs": []} for name, count in workers.items()}
    return {"ready": ready, "reason": "because", "namespaces": {"ns": {"worker_types": types}}}


def test_ready_needs_every_worker_of_every_role() -> None:
    expected = {"prefill": 2, "decode": 1}
    one = parse_readiness(answer(True, prefill=1, decode=1), "ns", expected)
    assert (one.is_ready, one.summary) == (False, "1 of 2 prefill, 1 of 1 decode")
    assert parse_readiness(answer(True, prefill=2, decode=1), "ns", expected).is_ready
    assert parse_readiness(answer(True, aggregated=1), "ns", {"agg": 1}).is_ready


def test_the_frontends_no_counts_even_when_the_workers_are_there() -> None:
    seen = parse_readiness(answer(False, aggregated=1), "ns", {"agg": 1})
    assert not seen.is_ready
    assert "because" in seen.summary


def test_workers_of_another_namespace_do_not_count() -> None:
    assert not parse_readiness(answer(True, aggregated=1), "other", {"agg": 1}).is_ready


@contextlib.contextmanager
def http_server(code: int, body: bytes) -> Iterator[str]:
    class Fixed(Handler):
        def do_GET(self) -> None:
            self.answer(code, body)

        do_POST = do_GET

    with serving(Fixed) as url:
        yield url


@pytest.mark.parametrize(("code", "body"), [(404, b""), (200, b"not json"), (200, b"[]"), (500, b"{}")])
def test_an_odd_answer_is_not_ready_yet_and_no_error(code: int, body: bytes) -> None:
    with http_server(code, body) as url:
        assert not ask_readiness(url, "tiny", "ns", {"agg": 1}).is_ready


def test_no_server_is_not_ready_yet_and_no_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        assert not ask_readiness(f"http://127.0.0.1:{port}", "tiny", "ns", {"agg": 1}).is_ready
        assert complete(f"http://127.0.0.1:{port}", "tiny", "hi", 1, timeout_s=1) is not None


@pytest.mark.parametrize(
    ("code", "body", "problem"),
    [
        (200, b'{"choices": [{"finish_reason": "length"}]}', None),
        (200, b'{"choices": [{"finish_reason": null}]}', "finish_reason"),
        (503, b"busy", "503"),
        (404, b"", "empty body"),
    ],
)
def test_a_request_proves_the_route_only_with_a_finish_reason(code: int, body: bytes, problem: str | None) -> None:
    with http_server(code, body) as url:
        seen = complete(url, "tiny", "hi", 1, timeout_s=5)
    assert seen is None if problem is None else problem in str(seen)


def test_a_port_in_use_is_refused_with_its_holder_and_the_way_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError) as refused:
            PortHolder().hold("127.0.0.1", port)
    for words in (str(port), f"pid {os.getpid()}", "--port"):
        assert words in str(refused.value)


def test_a_held_port_is_nobody_elses_until_it_is_released() -> None:
    holder = PortHolder()
    ports = (holder.hold("127.0.0.1", 0), *holder.hold_internal(20))
    assert len(set(ports)) == 21
    with pytest.raises(UsageError):
        PortHolder().hold("127.0.0.1", ports[3])
    assert holder.hold("127.0.0.1", ports[0]) == ports[0]
    holder.release(ports)
    again = PortHolder()
    assert again.hold("127.0.0.1", ports[3]) == ports[3]
    again.release(ports)


@pytest.mark.parametrize("ephemeral", ["1024 65535", "15100 60999", "32768 60999", "50000 60999", "", None])
def test_internal_ports_fit_a_signed_16_bit_number_whatever_the_ephemeral_range(
    tmp_path: Path, ephemeral: str | None
) -> None:
    path = tmp_path / "ip_local_port_range"
    if ephemeral is not None:
        path.write_text(ephemeral)
    holder = PortHolder(path)
    ports = holder.hold_internal(100)
    holder.release(ports)
    assert max(ports) < 2**15


def test_internal_ports_stay_below_the_ephemeral_range_where_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "ip_local_port_range"
    path.write_text("18000 60999")
    holder = PortHolder(path)
    ports = holder.hold_internal(100)
    holder.release(ports)
    assert max(ports) < 18000


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(UsageError, match="192.0.2.1"):
        PortHolder().hold("192.0.2.1", 0)


def test_children_inherit_nothing_that_reaches_into_another_system() -> None:
    inherited = {"PATH": "/bin", "DYN_NAMESPACE": "a", "ETCD_ENDPOINTS": "b", "NATS_SERVER": "c", "SLURM_JOB_ID": "d"}
    inherited |= {"PMIX_RANK": "e", "OMPI_COMM_WORLD_RANK": "f", "TRTX_TOPOLOGY": "g", "HOME": "/root"}
    inherited |= {"http_proxy": "h", "HTTPS_PROXY": "i", "all_proxy": "j"}
    assert child_environment(inherited, {"DYN_NAMESPACE": "mine"}) == {
        "PATH": "/bin",
        "HOME": "/root",
        "DYN_NAMESPACE": "mine",
    }


def test_the_owner_of_a_record_is_the_process_that_listens_on_its_port(tmp_path: Path) -> None:
    instances, cards = tmp_path / "v1" / "instances", tmp_path / "v1" / "mdc"
    instances.mkdir(parents=True)
    cards.mkdir()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        for worker_id, at in ((7, port), (9, 1)):
            transport = {"tcp": f"127.0.0.1:{at}/x/generate"}
            record = {"instance_id": worker_id, "endpoint": "generate", "transport": transport}
            for bucket in (instances, cards):
                (bucket / f"ns%2Fbackend%2Fgenerate%2F{worker_id:x}").write_text(json.dumps(record))
        (instances / "half-written").write_text('{"instance_id": 11, "trans')
        registry = FileRegistry(tmp_path)
        assert registry.worker_ids() == {7, 9}
        assert owner(registry, os.getpid(), set()) == 7
        assert owner(registry, os.getpid(), {7}) is None
    registry.remove(7)
    assert registry.worker_ids() == {9}


def test_a_registry_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    registry = FileRegistry(tmp_path / "absent")
    assert registry.worker_ids() == set()
    registry.remove(1)


def test_the_machine_has_cores_and_a_hidden_gpu_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    machine = probe()
    assert machine.cpu_cores >= 1
    assert machine.gpus == ()
