"""Which encoders are proved to encode pictures: asked of a server that answers chats and metrics as a script says."""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import ssl
from collections.abc import Iterator
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from certificates import Pair, make
from loopback import Handler, running
from PIL import Image

from trtx.checkpoint import resolve_checkpoint
from trtx.engine.worker_facts import PATH, PublishedWorker, WorkerFacts, to_body
from trtx.launch.image_proofs import ImageProofs
from trtx.topology import Plan, ProcessSpec, ServerTls


class Deployment:
    """A frontend, and encode workers on ports of their own; each chat's picture goes to one of them in turn."""

    def __init__(self, encoders: int) -> None:
        self.encoded = [0] * encoders
        self.refusal = ""
        self.published: Any = []
        self.pins: list[set[str]] = []  # headers of each chat that say where it is to go
        self.pictures: list[bytes] = []
        self.dead: set[int] = set()  # encoders that get their picture and encode none
        self._turns = itertools.count()

    def chat(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        (part,) = body["messages"][0]["content"]
        self.pictures.append(base64.b64decode(part["image_url"]["url"].partition(",")[2]))
        at = next(self._turns) % len(self.encoded)
        if self.refusal:
            return 400, {"message": self.refusal}
        self.encoded[at] += at not in self.dead
        return 200, {}


@contextlib.contextmanager
def serving(deployment: Deployment, pair: Pair | None = None) -> Iterator[list[int]]:
    """Ports: of the frontend, then of each encoder. ``pair``: the frontend serves TLS with it."""

    class Process(Handler):
        number: int  # 0: the frontend

        def do_GET(self) -> None:
            encoded = deployment.encoded[self.number - 1]
            count = f'trtx_media_pictures_total{{model="m",stage="encode"}} {encoded}.0\n'
            self.answer(200, deployment.published if self.path == PATH else count.encode())

        def do_POST(self) -> None:
            deployment.pins.append({name for name in self.headers if name.endswith("-instance-id")})
            self.answer(*deployment.chat(self.asked()))

    with contextlib.ExitStack() as stack:
        servers = [
            ThreadingHTTPServer(("127.0.0.1", 0), type("Process", (Process,), {"number": number}))
            for number in range(1 + len(deployment.encoded))
        ]
        if pair is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(pair.certificate, pair.key)
            servers[0].socket = context.wrap_socket(servers[0].socket, server_side=True)
        for server in servers:
            stack.enter_context(running(server))
        yield [server.server_port for server in servers]


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_checkpoint("synthetic:tiny-vl").path


def plan_of(model: Path, ports: list[int], *, role: str = "encode", limits: str = "") -> Plan:
    argv = ("python", "--media", limits) if limits else ()
    encoders = [
        ProcessSpec(f"{role}-{number}", role, argv, {}, Path(), system_port=port)  # type: ignore[arg-type]
        for number, port in enumerate(ports[1:])
    ]
    agg = ProcessSpec("agg-9", "agg", argv, {}, Path(), system_port=1)
    return Plan(
        mode="agg", engine="torch", model="vl", model_path=model, namespace="ns", host="127.0.0.1", port=ports[0],
        internal_ports=(), run_dir=Path(), scratch_dir=Path(),
        processes=(*encoders, *([agg] if role == "encode" else [])), engine_configs={}, gpu_names=(), reasons=(),
    )  # fmt: skip


@pytest.mark.parametrize("role", ["encode", "prefill", "agg"])
def test_a_picture_goes_through_every_encoder_and_through_none_twice_for_nothing(model: Path, role: str) -> None:
    deployment = Deployment(3)
    with serving(deployment) as ports:
        proofs = ImageProofs(plan_of(model, ports, role=role))
        assert [one.name for one in proofs.encoders] == [f"{role}-{number}" for number in range(3)]
        assert proofs.prove_missing(5) is None
        assert deployment.encoded == [1, 1, 1]
        assert proofs.summary == f", and an image through {role}-0, {role}-1, {role}-2"
        assert proofs.prove_missing(5) is None
        assert len(deployment.pictures) == 3, "who has encoded one since it began is asked no more"
        deployment.encoded[1] = 0  # it was started again
        assert proofs.prove_missing(5) is None
        assert deployment.encoded[1] == 1
    sizes = [Image.open(io.BytesIO(one)).convert("RGB").size for one in deployment.pictures]
    assert set(sizes) == {(32, 32)}
    assert len(set(deployment.pictures)) == len(deployment.pictures), "a cache would answer for an encoder"


def test_an_encoder_that_encodes_none_is_named_though_every_picture_is_answered(model: Path) -> None:
    deployment = Deployment(2)
    deployment.dead = {1}
    with serving(deployment) as ports:
        said = ImageProofs(plan_of(model, ports)).prove_missing(5)
    assert said == "none of 40 answered images went through encode-1; see its log"


def test_what_a_picture_is_refused_with_is_the_cause(model: Path) -> None:
    deployment = Deployment(1)
    deployment.refusal = "image 1 can't be encoded: no such file"
    with serving(deployment) as ports:
        said = ImageProofs(plan_of(model, ports)).prove_missing(5)
    assert said == "no image went through encode-0: HTTP 400: image 1 can't be encoded: no such file"


def test_a_context_that_holds_no_picture_is_told_and_keeps_nobody_from_text(model: Path) -> None:
    deployment = Deployment(1)
    deployment.refusal = "the prompt has 99 tokens and the context holds 64 together with the output; send at most 63"
    with serving(deployment) as ports:
        proofs = ImageProofs(plan_of(model, ports))
        assert proofs.prove_missing(5) is None
    assert proofs.summary.startswith("; images are not checked: HTTP 400: the prompt has 99 tokens")


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ('{"max_images": 0}', "; images are not checked: max_images is 0"),
        ('{"max_image_pixels": 100}', "; images are not checked: max_image_pixels is 100"),
        ('{"max_media_bytes": 9}', "; images are not checked: max_media_bytes is 9"),
    ],
)
def test_limits_that_refuse_every_picture_are_told_and_none_is_sent(model: Path, limits: str, told: str) -> None:
    deployment = Deployment(1)
    with serving(deployment) as ports:
        proofs = ImageProofs(plan_of(model, ports, limits=limits))
        assert (proofs.prove_missing(5), proofs.summary) == (None, told)
    assert deployment.pictures == []


def test_nothing_is_sent_to_a_text_model_or_another_engine(model: Path) -> None:
    text = plan_of(resolve_checkpoint("synthetic:tiny").path, [1, 2])
    for plan in (text, replace(plan_of(model, [1, 2]), engine="paced")):
        proofs = ImageProofs(plan)
        assert (proofs.encoders, proofs.summary, proofs.prove_missing(1)) == ((), "", None)


@pytest.mark.parametrize(
    ("role", "pinned"), [("agg", {"x-worker-instance-id"}), ("prefill", {"x-prefill-instance-id"}), ("encode", set())]
)
@pytest.mark.parametrize("is_tls", [False, True])
def test_a_request_is_sent_to_the_worker_whose_encoder_is_asked_for(
    model: Path, role: Any, pinned: set[str], is_tls: bool, tmp_path: Path
) -> None:
    pair = make(tmp_path, "server", ["127.0.0.1"]) if is_tls else None
    deployment = Deployment(2)
    facts = WorkerFacts("", role, "torch", {}, (), 1, 512, 1, 1, 16, 1)
    published = [PublishedWorker(7 + number, "vl", replace(facts, name=f"{role}-{number}")) for number in range(2)]
    deployment.published = to_body(published)
    with serving(deployment, pair) as ports:
        plan = plan_of(model, ports, role=role)
        if pair is not None:
            plan = replace(plan, tls=ServerTls(pair.certificate, pair.key, ("127.0.0.1",)))
        assert ImageProofs(plan).prove_missing(5) is None
    assert deployment.pins == [pinned, pinned]
