"""Which pairs of workers are proved to hand KV over: asked of a server that routes and answers as a script says."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loopback import Handler, serving

from trtx.engine.handoff_facts import HandoffFacts
from trtx.engine.worker_facts import PATH, PublishedWorker, WorkerFacts, to_body
from trtx.launch.handoffs import HandoffProofs, WorkerPair, ask_worker_ids, pairs_of
from trtx.topology import Plan, ProcessSpec

Answer = Callable[[str, str], HandoffFacts | str | None]  # of a prefill and a decode worker; a text refuses the request


class Frontend:
    """Goes by the headers for prefill, and for decode where it is told to; else it takes decode workers in turn."""

    def __init__(self, ids: dict[str, int]) -> None:
        self.ids = dict(ids)
        self.pins_decode = False
        self.answer: Answer = lambda prefill, decode: HandoffFacts(decode, "read", prefill, 4096, 0.01)
        self.asked: list[dict[str, Any]] = []
        self.url = ""
        self._turns = itertools.count()
        self._lock = threading.Lock()

    def published(self) -> Any:
        facts = WorkerFacts("", "decode", "torch", {}, (), 1, 512, 1, 1, 16, 1)
        return to_body([PublishedWorker(one, "tiny", replace(facts, name=name)) for name, one in self.ids.items()])

    def post(self, path: str, headers: Any, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._lock:
            self.asked.append(body)
            names = {str(one): name for name, one in self.ids.items()}
            prefill = names.get(headers["x-prefill-instance-id"] or "", "prefill-0")
            decoders = sorted(name for name in self.ids if name.startswith("decode"))
            decode = decoders[next(self._turns) % len(decoders)]
            if self.pins_decode:
                decode = names[headers["x-worker-instance-id"]]
        said = self.answer(prefill, decode)
        if isinstance(said, str):
            return (400, {"message": said}) if path.endswith("chat/completions") else (500, {"message": "no stream"})
        return 200, {"nvext": {"engine_data": {} if said is None else said.to_engine_data()}}


@contextlib.contextmanager
def served(frontend: Frontend) -> Iterator[Frontend]:
    class Routes(Handler):
        def do_GET(self) -> None:
            self.answer(200 if self.path == PATH else 404, frontend.published())

        def do_POST(self) -> None:
            self.answer(*frontend.post(self.path, self.headers, self.asked()))

    with serving(Routes) as frontend.url:
        yield frontend


def worker(name: str, host: str = "", device: str = "", log: Path = Path("/nowhere")) -> ProcessSpec:
    env = {"UCX_NET_DEVICES": device} if device else {}
    return ProcessSpec(name, name.partition("-")[0], (), env, log, host=host)  # type: ignore[arg-type]


def plan(*workers: ProcessSpec, engine: str = "torch", mode: Any = "disagg") -> Plan:
    return Plan(
        mode=mode, engine=engine, model="tiny", model_path=Path(), namespace="ns", host="127.0.0.1", port=1,
        internal_ports=(), run_dir=Path(), scratch_dir=Path(), processes=workers, engine_configs={}, gpu_names=(),
        reasons=(),
    )  # fmt: skip


NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
IDS = {name: 2**63 + number for number, name in enumerate(NAMES)}
EVERY = {WorkerPair(prefill, decode) for prefill in NAMES[:2] for decode in NAMES[2:]}
TWO_BY_TWO = plan(*map(worker, NAMES))


@pytest.fixture
def frontend() -> Iterator[Frontend]:
    with served(Frontend(IDS)) as made:
        yield made


@pytest.mark.parametrize("pins_decode", [True, False])
def test_every_pair_is_proved_whether_or_not_the_router_goes_by_what_it_is_asked(
    frontend: Frontend, pins_decode: bool
) -> None:
    frontend.pins_decode = pins_decode
    proofs = HandoffProofs(TWO_BY_TWO, frontend.url)
    ids = proofs.worker_ids()
    assert ids == IDS
    assert set(proofs.missing(ids)) == EVERY
    assert proofs.summary == ""
    assert proofs.prove_missing(ids, 5) is None
    assert proofs.missing(ids) == ()
    assert proofs.summary == ", and KV in each of 4 pairs of workers"
    assert not pins_decode or len(frontend.asked) == 4, "one request a pair is enough where all are pinned"
    assert len({body["prompt"] for body in frontend.asked}) == len(frontend.asked), "a cache would answer for a worker"
    assert all(body["min_tokens"] > 1 for body in frontend.asked), "one token is prefill's: decode would read nothing"


def test_a_worker_that_was_started_again_is_proved_again_and_no_other(frontend: Frontend) -> None:
    frontend.pins_decode = True
    proofs = HandoffProofs(TWO_BY_TWO, frontend.url)
    assert proofs.prove_missing(proofs.worker_ids(), 5) is None
    frontend.ids["decode-1"] = 77
    frontend.asked.clear()
    ids = proofs.worker_ids()
    assert set(proofs.missing(ids)) == {pair for pair in EVERY if pair.decode == "decode-1"}
    assert proofs.prove_missing(ids, 5) is None
    assert len(frontend.asked) == 2


@pytest.mark.parametrize("pins_decode", [True, False])
def test_a_pair_without_kv_is_named_with_its_devices_and_the_cause(
    frontend: Frontend, pins_decode: bool, tmp_path: Path
) -> None:
    log = tmp_path / "decode-1.log"
    log.write_text("Unexpected UCX error\n[17.5] [vm:7:0]  select.c:722  UCX  ERROR   tcp/lo - no route to 10.0.0.1\n")
    frontend.pins_decode = pins_decode
    frontend.answer = lambda prefill, decode: (
        HandoffFacts(decode, "recomputed", prefill, because="it can't be reached (NIXL_ERR_BACKEND)")
        if (prefill, decode) == ("prefill-0", "decode-1")
        else HandoffFacts(decode, "read", prefill, 4096, 0.01)
    )
    hosts = {name: "node2" if name == "decode-1" else "node1" for name in NAMES}
    workers = [worker(name, hosts[name], "lo" if name == "decode-1" else "eth1", log) for name in NAMES]
    proofs = HandoffProofs(plan(*workers), frontend.url)
    assert proofs.prove_missing(proofs.worker_ids(), 5) == (
        "no KV came from prefill-0 (on node1, UCX_NET_DEVICES=eth1) to decode-1 (on node2, UCX_NET_DEVICES=lo): "
        "it can't be reached (NIXL_ERR_BACKEND); UCX says: tcp/lo - no route to 10.0.0.1; "
        "correct the device of node1 and of node2 in the hosts file: it has to name a network device on each side that "
        "reaches the other"
    )
    assert WorkerPair("prefill-0", "decode-1") in proofs.missing(IDS)
    assert proofs.summary == ""


def test_a_proof_of_another_pair_does_not_stand_in_for_a_missing_one(frontend: Frontend) -> None:
    frontend.pins_decode = True
    frontend.answer = lambda prefill, decode: (
        HandoffFacts(decode, "recomputed", prefill, because="late")
        if (prefill, decode) == ("prefill-0", "decode-1")
        else HandoffFacts(decode, "read", "prefill-9" if decode == "decode-1" else prefill, 4096, 0.01)
    )
    proofs = HandoffProofs(TWO_BY_TWO, frontend.url)
    assert proofs.prove_missing(IDS, 5) is not None
    assert proofs.summary == ""


def test_one_read_that_fails_is_asked_for_again(frontend: Frontend) -> None:
    answers = iter(["recomputed"])
    frontend.answer = lambda prefill, decode: HandoffFacts(decode, next(answers, "read"), prefill, 1, 0.01, "late")  # type: ignore[arg-type]
    assert HandoffProofs(TWO_BY_TWO, frontend.url).prove_missing(IDS, 5) is None


def test_what_a_worker_refuses_a_request_with_is_the_cause(frontend: Frontend) -> None:
    frontend.answer = lambda prefill, decode: "tokens_per_block is 16 on prefill, 32 on decode."
    one = plan(worker("prefill-0"), worker("decode-0"))
    said = HandoffProofs(one, frontend.url).prove_missing(IDS, 5)
    assert said == "no KV came from prefill-0 to decode-0: tokens_per_block is 16 on prefill, 32 on decode"


def test_a_request_that_no_prefill_worker_had_proves_nothing(frontend: Frontend) -> None:
    frontend.answer = lambda prefill, decode: HandoffFacts(decode, "whole")
    said = HandoffProofs(TWO_BY_TWO, frontend.url).prove_missing(IDS, 5)
    assert said is not None and "received a request that no prefill worker had processed" in said


def test_a_prompt_that_the_router_left_to_a_decode_worker_is_no_proof_and_the_pair_is_asked_again(
    frontend: Frontend,
) -> None:
    frontend.pins_decode, answers = True, iter(["local"])
    frontend.answer = lambda prefill, decode: HandoffFacts(decode, next(answers, "read"), prefill, 1, 0.01)  # type: ignore[arg-type]
    proofs = HandoffProofs(TWO_BY_TWO, frontend.url)
    assert proofs.prove_missing(IDS, 5) is None and len(frontend.asked) == 5
    frontend.answer = lambda prefill, decode: HandoffFacts(decode, "local")
    said = HandoffProofs(TWO_BY_TWO, frontend.url).prove_missing(IDS, 5)
    assert said == "the router sent no request from prefill-0 to decode-0"


@pytest.mark.parametrize("outcome", ["unknown", None])
def test_an_engine_that_does_not_say_leaves_it_open_and_is_told_of(frontend: Frontend, outcome: Any) -> None:
    frontend.answer = lambda prefill, decode: HandoffFacts(decode, outcome, prefill) if outcome else None
    proofs = HandoffProofs(TWO_BY_TWO, frontend.url)
    assert proofs.prove_missing(IDS, 5) is None
    assert proofs.summary.startswith("; handoffs are not checked: decode-")
    assert set(proofs.missing(IDS)) == EVERY, "what nobody checked is not proved"


def test_a_pair_that_the_router_never_takes_is_not_taken_for_proved(frontend: Frontend) -> None:
    frontend.answer = lambda prefill, decode: HandoffFacts("decode-0", "read", prefill, 1, 0.01)
    said = HandoffProofs(TWO_BY_TWO, frontend.url).prove_missing(IDS, 5)
    assert said == "the router sent no request from prefill-0 to decode-1"


def test_a_frontend_that_is_gone_proves_nothing() -> None:
    proofs = HandoffProofs(TWO_BY_TWO, "http://127.0.0.1:9")
    assert proofs.worker_ids() == {}
    said = proofs.prove_missing({}, 1)
    assert said is not None and said.startswith(
        "the frontend did not answer the request that checks the handoff between prefill-0 and decode-0: Connection"
    )


def test_two_workers_of_one_name_have_no_id(frontend: Frontend) -> None:
    old = frontend.published()
    frontend.ids["decode-1"] = 5
    both = [*old, *frontend.published()]
    frontend.published = lambda: both  # type: ignore[method-assign]
    assert "decode-1" not in ask_worker_ids(frontend.url, "tiny")
    assert ask_worker_ids(frontend.url, "another model") == {}


@pytest.mark.parametrize(("engine", "mode"), [("paced", "disagg"), ("simulated", "disagg"), ("torch", "agg")])
def test_nothing_is_proved_where_no_kv_is_handed_over(engine: str, mode: str) -> None:
    proofs = HandoffProofs(
        plan(worker("prefill-0"), worker("decode-0"), engine=engine, mode=mode), "http://127.0.0.1:9"
    )
    assert (proofs.pairs, proofs.worker_ids(), proofs.prove_missing({}, 1), proofs.summary) == ((), {}, None, "")


def test_of_many_pairs_each_worker_is_in_one_and_each_pair_of_hosts() -> None:
    prefill = [worker(f"prefill-{n}", f"node{n % 3}") for n in range(9)]
    decode = [worker(f"decode-{n}", f"node{n % 4}") for n in range(12)]
    many = plan(*prefill, *decode)
    assert len(pairs_of(many, most=108)) == 108
    chosen = pairs_of(many)
    hosts = {one.name: one.host for one in (*prefill, *decode)}
    assert len(chosen) <= 12 + 12
    assert {one.prefill for one in chosen} | {one.decode for one in chosen} == hosts.keys()
    assert len({(hosts[one.prefill], hosts[one.decode]) for one in chosen}) == 12
