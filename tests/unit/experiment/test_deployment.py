"""What stands behind a URL: what each kind of server publishes of itself, nothing more, and who is sent a key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
from loopback import Handler, serving
from other_server import CHAT, MODEL, MODELS, SGLANG, VLLM, OtherServer, dynamo, models, other_server

from trtx.engine.worker_facts import PATH, PublishedWorker, Role, WorkerFacts, to_body
from trtx.errors import UsageError
from trtx.experiment import Attach
from trtx.experiment.deployment import API_KEY_VARIABLE, api_key, ask_context_length, ask_deployment
from trtx.runs.forms import Deployment

KEY = "sk-a-key-of-nobody"


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)


def asked(server: OtherServer, **said: Any) -> Deployment:
    return ask_deployment(Attach.model_validate({"url": server.url, **said}))


def told(documents: dict[str, Any], **said: Any) -> Deployment:
    with other_server(documents) as server:
        return asked(server, **said)


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://user:secret@127.0.0.1:9")  # at which nobody listens
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])  # the second is no loopback address by its name
@pytest.mark.usefixtures("proxied")
def test_a_server_is_asked_past_a_proxy_of_the_environment(host: str) -> None:
    with other_server(dynamo("cpu", aggregated=1)) as server:
        deployment = ask_deployment(Attach(url=server.url.replace("127.0.0.1", host)))
        assert deployment.model == MODEL
        ask_context_length(deployment)


@pytest.mark.usefixtures("proxied")
def test_a_server_that_only_a_proxy_reaches_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as told:
        ask_deployment(Attach(url="http://127.0.0.1:9"))
    assert "; HTTP_PROXY is set, but trtx and aiperf bypass it" in str(told.value) and "secret" not in str(told.value)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(UsageError) as told:
        ask_deployment(Attach(url="http://127.0.0.1:9"))
    assert "PROXY" not in str(told.value)


def test_a_gpu_that_two_workers_share_is_one() -> None:
    def of(role: Role, *gpus: str) -> PublishedWorker:
        told = worker(role, *(["H100"] * len(gpus)))
        return replace(told, facts=replace(told.facts, gpu_uuids=gpus))

    found = told(
        published(of("encode", "a"), of("prefill", "a"), of("decode", "b", "c"), encode=1, prefill=1, decode=1)
    )
    assert (found.gpu_names, found.gpu_count) == (("H100",) * 3, 3)
    apart = told(published(of("encode", "d"), of("prefill", "a"), encode=1, prefill=1))
    assert apart.gpu_count == 2


def worker(role: Role, *gpus: str, name: str = "", trtx: str = "0.1.0", model: str = MODEL) -> PublishedWorker:
    facts = WorkerFacts(name or role, role, "torch", {"trtx": trtx}, gpus, max(1, len(gpus)), 8192, 64, 2048, 32, 99)
    return PublishedWorker(2**63 + 1, model, facts)


def published(*workers: PublishedWorker, **counts: int) -> dict[str, Any]:
    return {**dynamo(**counts), PATH: to_body(workers)}


def test_dynamo_counts_its_workers_by_role_as_a_request_meets_them() -> None:
    found = told(dynamo("cpu", "cpu", "cpu", decode=2, prefill=1))
    assert (found.server, found.server_version, found.model) == ("NVIDIA Dynamo", "1.4.2", MODEL)
    assert found.workers is not None and list(found.workers.items()) == [("prefill", 1), ("decode", 2)]
    assert found.worker_count == 3
    assert (found.engine, found.versions) == (None, None), "Dynamo's own workers publish neither over HTTP"
    assert told(dynamo("cpu", aggregated=4)).workers == {"agg": 4}


@pytest.mark.parametrize(
    ("devices", "count"), [(["cpu", "cpu"], 0), (["cuda", "cuda"], None), (["cpu", "cuda"], None), ([], None)]
)
def test_a_worker_that_may_see_no_gpu_has_none_and_any_other_has_not_said(
    devices: list[str], count: int | None
) -> None:
    assert told(dynamo(*devices, aggregated=2)).gpu_count == count


def test_workers_of_trtx_tell_gpus_engine_and_versions() -> None:
    ours = [worker("prefill", "H100"), worker("decode", "H100", "H100", trtx="0.2.0")]
    found = told(published(*ours, prefill=1, decode=1))
    assert (found.gpu_names, found.gpu_count, found.engine) == (("H100",) * 3, 3, "torch")
    assert found.versions == {"trtx": "0.1.0 and 0.2.0"}
    none = told(published(worker("agg"), aggregated=1))
    assert (none.gpu_names, none.gpu_count) == ((), 0)


@pytest.mark.parametrize(
    "workers",
    [
        [worker("prefill", "H100")],  # the decode worker is another's
        [worker("prefill", "H100"), worker("decode", "H100", model="other")],
        [worker("prefill", "H100"), worker("decode", "H100"), worker("decode", "H100", name="gone")],
    ],
)
def test_what_not_all_workers_publish_is_not_known_of_the_deployment(workers: list[PublishedWorker]) -> None:
    found = told(published(*workers, prefill=1, decode=1))
    assert (found.worker_count, found.gpu_names, found.engine, found.versions) == (2, None, None, None)


def test_an_unknown_number_of_gpus_of_one_worker_makes_that_of_all_unknown() -> None:
    silent = PublishedWorker(1, MODEL, WorkerFacts("agg-1", "agg", "torch", {}, None, 1, 8, None, None, None, None))
    assert told(published(worker("agg", "H100"), silent, aggregated=2)).gpu_count is None


@pytest.mark.parametrize("body", [{"workers": []}, [{"worker_id": 1}], [1], "none", None])
def test_another_answer_at_our_route_is_no_fact(body: Any) -> None:
    assert told({**dynamo(aggregated=1), PATH: body}).engine is None


@pytest.mark.parametrize(
    "ready",
    [
        None, [], {"namespaces": []}, {"namespaces": {"ns": {}}},
        {"namespaces": {"ns": {"worker_types": {"decode": {"workers": "2"}}}}},
    ],
)  # fmt: skip
def test_a_dynamo_that_does_not_count_leaves_the_count_unknown(ready: Any) -> None:
    found = told({**dynamo("cpu", aggregated=1), f"/v1/models/{MODEL}/ready": ready})
    assert (found.server, found.workers, found.worker_count, found.gpu_count) == ("NVIDIA Dynamo", None, None, None)


@pytest.mark.parametrize(
    ("documents", "server", "version"),
    [
        (VLLM, "vLLM", "0.19.1"),
        (SGLANG, "SGLang", "0.5.9"),
        ({MODELS: models("sglang"), "/server_info": {"version": "0.6.0"}}, "SGLang", "0.6.0"),
        ({MODELS: models("tensorrt_llm"), "/version": {"version": "1.3.0rc22"}}, "TensorRT-LLM", "1.3.0rc22"),
        ({MODELS: models("vllm"), "/version": ["0.19.1"]}, "vLLM", None),
        ({MODELS: models("somebody"), "/version": {"version": "7"}}, None, None),
        ({MODELS: models(None), "/openapi.json": {"info": {"title": "FastAPI", "version": "0.1.0"}}}, None, None),
    ],
)
def test_of_another_server_its_name_and_version_at_most(
    documents: dict[str, Any], server: str | None, version: str | None
) -> None:
    found = told(documents)
    assert (found.server, found.server_version) == (server, version)
    assert (found.workers, found.worker_count, found.gpu_names, found.gpu_count) == (None, None, None, None)


def test_gpus_are_what_was_said_where_nobody_publishes_them() -> None:
    assert (told(VLLM, gpu_count=4).gpu_count, told(VLLM, gpu_count=0).gpu_count) == (4, 0)
    assert told(published(worker("agg", "H100"), aggregated=1), gpu_count=1).gpu_count == 1
    with pytest.raises(UsageError, match="--gpu-count is 4, and the workers at .* have 1; leave it out"):
        told(published(worker("agg", "H100"), aggregated=1), gpu_count=4)


def test_a_model_that_is_not_served_is_told_with_those_that_are() -> None:
    two = {MODELS: models("vllm", "one", "two")}
    assert told(two, model="two").model == "two"
    with pytest.raises(UsageError, match="--model is needed for .*, which serves one, two"):
        told(two)
    with pytest.raises(UsageError, match="model 'three' is not served at .*, which serves one, two"):
        told(two, model="three")


@pytest.mark.parametrize("body", [{}, [], {"data": [1]}, {"data": [{}]}, {"data": {"id": 1}}])
def test_what_is_no_list_of_models_is_refused_with_its_address(body: Any) -> None:
    with pytest.raises(UsageError, match=r"http://127\.0\.0\.1:\d+/v1/models did not answer .*; check --url"):
        told({MODELS: body})


@pytest.mark.parametrize("path", [MODELS, CHAT])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    ("location", "where"),
    [
        ("https://user:pw@other:8443/v1/x?token=secret#a", "to https://other:8443/v1/x, and trtx follows no redirect"),
        ("/login", "to {url}/login, and trtx"),
        ("https://[", "to something that is not an address, and trtx"),
        ("", "without an address"),
    ],
)
def test_a_server_that_sends_on_is_refused_with_where_it_leads(
    path: str, status: int, location: str, where: str
) -> None:
    with other_server(VLLM, sends_on={path: (status, location)}) as server:
        with pytest.raises(UsageError) as error:
            asked(server)
        said = str(error.value)
        assert f"{server.url}{path} answers with HTTP {status}: it redirects" in said
        assert where.format(url=server.url) in said and "secret" not in said and "pw" not in said


def test_nothing_is_asked_of_where_a_server_leads_and_its_key_goes_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    with other_server(VLLM, key=KEY) as elsewhere:
        sends_on = {CHAT: (307, f"{elsewhere.url}{CHAT}")}
        with other_server(VLLM, key=KEY, sends_on=sends_on) as server, pytest.raises(UsageError, match="HTTP 307"):
            asked(server)
        assert (CHAT, f"Bearer {KEY}") in server.seen and not elsewhere.seen


def test_a_server_that_asks_for_no_key_is_sent_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    with other_server(VLLM) as server:
        found = asked(server)
    assert found.api_key_from is None and api_key(found) is None
    assert {authorization for _, authorization in server.seen} == {None}


@pytest.mark.parametrize("shows_models", [True, False])
def test_a_server_that_asks_for_a_key_gets_it_and_nobody_else_sees_it(
    monkeypatch: pytest.MonkeyPatch, shows_models: bool
) -> None:
    with other_server(VLLM, key=KEY, shows_models=shows_models) as server:
        with pytest.raises(UsageError) as missing:
            asked(server)
        assert str(missing.value) == f"{server.url} needs an API key; set OPENAI_API_KEY to a valid one"
        monkeypatch.setenv(API_KEY_VARIABLE, "")
        with pytest.raises(UsageError, match="needs an API key"):
            asked(server)
        monkeypatch.setenv(API_KEY_VARIABLE, "sk-wrong")
        with pytest.raises(UsageError) as wrong:
            asked(server)
        assert "rejects the API key in OPENAI_API_KEY" in str(wrong.value) and "sk-wrong" not in str(wrong.value)
        monkeypatch.setenv(API_KEY_VARIABLE, KEY)
        found = asked(server)
    assert (found.server, found.api_key_from, api_key(found)) == ("vLLM", API_KEY_VARIABLE, KEY)
    assert KEY not in repr(found)
    assert (CHAT, f"Bearer {KEY}") in server.seen


@pytest.mark.parametrize("key", [f"{KEY}\n", f"{KEY}\r\nX: 1", f"two {KEY}", f"{KEY}é"])
def test_a_key_that_no_header_carries_is_refused_unseen(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, key)
    with other_server(VLLM, key=KEY) as server, pytest.raises(UsageError) as refused:
        asked(server)
    assert "OPENAI_API_KEY has a character that an HTTP header can't contain" in str(refused.value) and KEY not in str(
        refused.value
    )


def test_an_address_below_a_path_keeps_it() -> None:
    below = {f"/api{path}": document for path, document in VLLM.items()}
    with other_server(below) as server:
        found = ask_deployment(Attach.model_validate({"url": f"{server.url}/api/v1"}))
    assert (found.url, found.server) == (f"{server.url}/api", "vLLM")


@pytest.mark.parametrize(
    ("entry", "length"),
    [
        ({"context_window": 4096}, 4096),  # Dynamo's word
        ({"max_model_len": 8192}, 8192),  # vLLM's
        ({"context_window": "4096"}, None),
        ({}, None),
    ],
)
def test_what_the_context_holds_is_what_the_list_of_models_says(entry: dict[str, Any], length: int | None) -> None:
    listed = {"data": [{"id": "other", "context_window": 1}, {"id": MODEL, **entry}]}
    with other_server({MODELS: listed}) as server:
        assert ask_context_length(asked(server, model=MODEL)) == length


class _Raising(Handler):
    """Ends the connection on which a chat without messages came, as uvicorn does where a handler raised."""

    protocol_version = "HTTP/1.1"
    connections: ClassVar[list[int]] = []

    def do_GET(self) -> None:
        self._answer(200, VLLM[MODELS] if self.path == MODELS else {})

    def do_POST(self) -> None:
        self.body()
        self._answer(500, b"Internal Server Error")
        self.close_connection = True

    def _answer(self, status: int, content: Any) -> None:
        self.connections.append(self.client_address[1])
        self.answer(status, content)


def test_no_question_comes_on_a_connection_that_another_may_have_ended() -> None:
    with serving(_Raising) as url:
        assert ask_deployment(Attach(url=url)).model == MODEL
    assert len(_Raising.connections) > 2 and len(set(_Raising.connections)) == len(_Raising.connections)
