"""What the frontend reads of its workers in Dynamo's file discovery: facts to show, and whether one is left."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import free_port

from trtx.engine.worker_facts import PublishedWorker, WorkerFacts
from trtx.frontend.discovery import lacks_generator, worker_context
from trtx.frontend.workers import published_workers, routes
from trtx.planes.file_registry import FileRegistry


def facts(name: str) -> WorkerFacts:
    return WorkerFacts(name, "decode", "paced", {"trtx": "0.1.0"}, (), 1, 8192, 64, 2048, 32, None)


def card(directory: Path, worker_id: int, runtime_config: Any) -> None:
    """As Dynamo 1.4.2 writes it, cut to what is read of it."""
    bucket = directory / "v1" / "mdc"
    bucket.mkdir(parents=True, exist_ok=True)
    record = {"type": "Model", "instance_id": worker_id, "card_json": {"display_name": "tiny"}}
    record["card_json"]["runtime_config"] = runtime_config  # type: ignore[index]
    (bucket / f"ns%2Fbackend%2Fgenerate%2F{worker_id:x}").write_text(json.dumps(record))


def test_each_worker_of_trtx_is_shown_with_its_model_by_name(tmp_path: Path) -> None:
    for worker_id, name in ((2**63 + 1, "decode-1"), (7, "decode-0")):
        card(tmp_path, worker_id, {"total_kv_blocks": None, "runtime_data": facts(name).to_runtime_data()})
    first, second = published_workers(FileRegistry(tmp_path))
    assert first == PublishedWorker(7, "tiny", facts("decode-0"))
    assert (second.worker_id, second.facts.name) == (2**63 + 1, "decode-1")


def test_others_workers_and_halves_of_cards_are_left_out(tmp_path: Path) -> None:
    assert published_workers(FileRegistry(tmp_path)) == ()
    card(tmp_path, 1, {"runtime_data": {"spec_decode": {"nextn": 1}}})
    card(tmp_path, 2, {"total_kv_blocks": 5})
    card(tmp_path, 3, None)
    bucket = tmp_path / "v1" / "mdc"
    (bucket / "half").write_text('{"type": "Model", "instance_id": 4, "card_j')
    (bucket / "list").write_text("[]")
    (bucket / "directory").mkdir()
    card(tmp_path, 5, {"runtime_data": facts("decode-0").to_runtime_data()})
    assert [worker.worker_id for worker in published_workers(FileRegistry(tmp_path))] == [5]


def test_the_context_is_that_of_the_worker_that_holds_most(tmp_path: Path) -> None:
    card(tmp_path, 1, {"runtime_data": {"spec_decode": {"nextn": 1}}})
    assert worker_context(FileRegistry(tmp_path)) == 0
    for worker_id, length, role in ((2, 4096, "decode"), (3, 8192, "prefill"), (4, 10**6, "encode")):
        held = replace(facts(f"{role}-{worker_id}"), context_length=length, role=role)
        card(tmp_path, worker_id, {"runtime_data": held.to_runtime_data()})
    assert worker_context(FileRegistry(tmp_path)) == 8192


def instance(directory: Path, worker_id: int, component: str, port: int) -> None:
    """As Dynamo 1.6.1 writes it, cut to what is read of it."""
    bucket = directory / "v1" / "instances"
    bucket.mkdir(parents=True, exist_ok=True)
    record = {"component": component, "endpoint": "generate", "instance_id": worker_id}
    record["transport"] = {"tcp": f"127.0.0.1:{port}/{worker_id:x}/generate"}
    (bucket / f"ns%2F{component}%2Fgenerate%2F{worker_id:x}").write_text(json.dumps(record))


def test_a_worker_is_left_while_one_that_generates_text_keeps_a_connection(tmp_path: Path) -> None:
    registry = FileRegistry(tmp_path)
    assert lacks_generator(registry)
    with socket.create_server(("127.0.0.1", 0)) as living, socket.create_server(("127.0.0.1", 0)) as dying:
        for worker_id, component in enumerate(("prefill", "encode")):
            instance(tmp_path, worker_id, component, living.getsockname()[1])
        instance(tmp_path, 2, "backend", free_port())
        assert lacks_generator(registry), "neither of the two that live generates text"

        instance(tmp_path, 3, "backend", dying.getsockname()[1])
        reset = threading.Thread(target=lambda: dying.accept()[0].close())
        reset.start()
        assert lacks_generator(registry), "a port that closes its connections is that of a process that ends"
        reset.join()

        instance(tmp_path, 4, "backend", living.getsockname()[1])
        (tmp_path / "v1" / "instances" / "ns%2Fbackend%2Fgenerate%2F3").unlink()
        assert not lacks_generator(registry)


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({"DYN_FILE_KV": "/kv", "DYN_DISCOVERY_BACKEND": "file"}, 1),
        ({"DYN_FILE_KV": "/kv", "DYN_DISCOVERY_BACKEND": "etcd"}, 0),
        ({"DYN_DISCOVERY_BACKEND": "file"}, 0),
        ({"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": "http://e:2379, http://f:2379", "DYN_NAMESPACE": "n"}, 1),
        ({"DYN_DISCOVERY_BACKEND": "kubernetes", "POD_NAMESPACE": "p", "DYN_NAMESPACE": "n"}, 1),
        ({"DYN_DISCOVERY_BACKEND": "kubernetes", "DYN_NAMESPACE": "n"}, 0),
        ({}, 0),
    ],
)
def test_there_is_a_route_where_the_cards_can_be_read(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], count: int
) -> None:
    for name in ("DYN_FILE_KV", "DYN_DISCOVERY_BACKEND", "ETCD_ENDPOINTS", "DYN_NAMESPACE", "POD_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert [(route.method, route.path) for route in routes()] == [("GET", "/trtx/workers")] * count
