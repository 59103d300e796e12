"""Queries the deployment at ``--url`` about itself. Information that it doesn't publish is None, never assumed.

Observed with Dynamo 1.4.2; for vLLM, SGLang and trtllm-serve, the routes are from their documentation. A single HTTP
server doesn't reveal the number of engines behind it (it may be a router, and data-parallel ranks are invisible), so
workers are counted only for Dynamo.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx

from trtx.bench.redirects import proxy_passed, sent_on
from trtx.engine import worker_facts
from trtx.engine.worker_facts import WorkerFacts
from trtx.errors import UsageError
from trtx.experiment.bench.spec import Attach
from trtx.planes.etcd import Etcd
from trtx.planes.etcd_registry import EtcdRegistry
from trtx.planes.registry import RegistryUnknown
from trtx.runs.forms import Deployment
from trtx.tls import CA_VARIABLE, trust_of

API_KEY_VARIABLE = "OPENAI_API_KEY"  # as in OpenAI's clients and ``aiperf chat``
_TIMEOUT_S = 10.0
_REFUSALS = (401, 403)
_MODELS, _CHAT = "/v1/models", "/v1/chat/completions"
DYNAMO, _DYNAMO_TITLE = "NVIDIA Dynamo", "NVIDIA Dynamo OpenAI Frontend"  # title in Dynamo's /openapi.json
# By ``owned_by`` in /v1/models: name of the server, and routes that return its version.
_SERVERS = {
    "vllm": ("vLLM", ("/version",)),
    "tensorrt_llm": ("TensorRT-LLM", ("/version",)),
    "sglang": ("SGLang", ("/server_info", "/get_server_info")),  # the second: before it was renamed
}
_ROLES = {"aggregated": "agg"}  # Dynamo's names of roles, where they differ from trtx's
_ORDER = {"encode": 0, "agg": 1, "prefill": 2, "decode": 3}  # order in which a request passes them; other roles follow


def ask_deployment(attach: Attach) -> Deployment:
    """Queries a deployment. Raises UsageError if it doesn't answer, needs a missing API key, or serves several
    models.
    """
    # Use a separate connection for each request: uvicorn closes a connection after a handler raised (as that of
    # transformers' server does for a chat without messages), and the next request on it would be reset.
    limits = httpx.Limits(max_keepalive_connections=0)
    trust = trust_of(attach.url)
    with httpx.Client(base_url=attach.url, timeout=_TIMEOUT_S, limits=limits, verify=trust, trust_env=False) as client:
        uses_key = _asks_for_key(client)
        if uses_key:
            client.headers["Authorization"] = f"Bearer {_needed_key(attach.url)}"
            if _asks_for_key(client):
                raise UsageError(f"{attach.url} rejects the API key in {API_KEY_VARIABLE}; set it to a valid one")
        model, owner = _served_model(client, attach)
        server, version = _server(client, owner)
        workers = _dynamo_workers(client, model) if server == DYNAMO else None
        if attach.etcd:
            published = _registered(client, attach, model, workers)
        else:
            published = _published(client, model, workers) if workers is not None else ()
        gpu_names = _gpu_names(client, published) if workers is not None else None
    return Deployment(
        url=attach.url,
        model=model,
        server=server,
        server_version=version,
        engine=", ".join(sorted({facts.engine for facts in published})) or None,
        versions=_versions(published),
        workers=workers,
        gpu_names=gpu_names,
        gpu_count=_gpu_count(attach, gpu_names),
        api_key_from=API_KEY_VARIABLE if uses_key else None,
        deterministic=_are_deterministic(published),
    )


def ask_context_length(deployment: Deployment) -> int | None:
    """Maximum tokens of prompt and answer from the list of models, which Dynamo and vLLM include under
    different names.
    """
    key = api_key(deployment)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    trust = trust_of(deployment.url)
    with httpx.Client(
        base_url=deployment.url, timeout=_TIMEOUT_S, headers=headers, verify=trust,
        trust_env=False,
    ) as client:  # fmt: skip
        entries = _at(_document(client, _MODELS), "data")
    for entry in entries if isinstance(entries, list) else ():
        if _at(entry, "id") == deployment.model:
            found = _at(entry, "context_window") or _at(entry, "max_model_len")
            return found if isinstance(found, int) else None
    return None


def api_key(deployment: Deployment) -> str | None:
    """The API key for requests to a deployment. Servers that ask for no key get none."""
    return None if deployment.api_key_from is None else _needed_key(deployment.url)


def _needed_key(url: str) -> str:
    key = os.environ.get(API_KEY_VARIABLE)
    if not key:
        raise UsageError(f"{url} needs an API key; set {API_KEY_VARIABLE} to a valid one")
    if not (key.isascii() and key.isprintable()) or " " in key:  # the key isn't shown
        raise UsageError(
            f"{API_KEY_VARIABLE} has a character that an HTTP header can't contain, such as a line break; set "
            "it to the key alone"
        )
    return key


def _asks_for_key(client: httpx.Client) -> bool:
    """Whether the server requires an API key. Also tries an empty chat request, because some servers list models
    freely.
    """
    if _models(client).status_code in _REFUSALS:
        return True
    try:
        answer = client.post(_CHAT, json={})
    except httpx.HTTPError:
        return False  # the load will report the error
    _refuse_redirect(client, _CHAT, answer)
    return answer.status_code in _REFUSALS


def _models(client: httpx.Client) -> httpx.Response:
    try:
        answer = client.get(_MODELS)
    except httpx.HTTPError as error:
        raise _no_openai(client, error) from error
    _refuse_redirect(client, _MODELS, answer)
    return answer


def _refuse_redirect(client: httpx.Client, path: str, answer: httpx.Response) -> None:
    asked = f"{str(client.base_url).rstrip('/')}{path}"
    if where := sent_on(answer.status_code, answer.headers.get("Location"), asked):
        raise UsageError(
            f"{asked} answers with HTTP {answer.status_code}: {where}, so the run would measure another server than "
            "the one named; give the address of the answering server with --url"
        )


def _served_model(client: httpx.Client, attach: Attach) -> tuple[str, str | None]:
    """The model to request, and its ``owned_by``."""
    try:
        answer = _models(client).raise_for_status()
        owners = {str(entry["id"]): entry.get("owned_by") for entry in answer.json()["data"]}
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _no_openai(client, error) from error
    served = list(owners)
    model = attach.model or (served[0] if len(served) == 1 else None)
    if model is None or model not in served:
        url = attach.url
        asked = f"model {attach.model!r} is not served at {url}" if attach.model else f"--model is needed for {url}"
        raise UsageError(f"{asked}, which serves {', '.join(served) or 'no model'}; name one of them with --model")
    return model, owners[model]


def _no_openai(client: httpx.Client, error: Exception) -> UsageError:
    url = f"{str(client.base_url).rstrip('/')}{_MODELS}"
    reason = " ".join(str(error).split()) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in reason:  # httpx keeps only the message of ssl's exception
        return UsageError(
            f"the certificate of {str(client.base_url).rstrip('/')} is not trusted here ({reason}); ask for a name "
            f"that it has, or set {CA_VARIABLE} to the certificates of its authority, in PEM"
        )
    passed = proxy_passed(url) if isinstance(error, httpx.TransportError) else ""
    return UsageError(f"{url} did not answer as OpenAI's API does ({reason}); check --url{passed}")


def _document(client: httpx.Client, path: str) -> Any:
    """The JSON document at a route, or None if the route doesn't exist; each route is specific to one server."""
    try:
        return client.get(path).raise_for_status().json()
    except (httpx.HTTPError, ValueError):
        return None


def _at(document: Any, *path: str) -> Any:
    """The value at a path of keys, or None."""
    for key in path:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _server(client: httpx.Client, owner: str | None) -> tuple[str | None, str | None]:
    """Name of the server software and its version."""
    if owner is not None and owner in _SERVERS:
        name, paths = _SERVERS[owner]
        found = (_at(_document(client, path), "version") for path in paths)
        return name, next((version for version in found if isinstance(version, str)), None)
    about = _at(_document(client, "/openapi.json"), "info")
    if _at(about, "title") != _DYNAMO_TITLE:
        return None, None
    version = _at(about, "version")
    return DYNAMO, version if isinstance(version, str) else None


def _dynamo_workers(client: httpx.Client, model: str) -> dict[str, int] | None:
    """Number of workers by role; None if the frontend is too old to report it."""
    counts: Counter[str] = Counter()
    for namespace in _namespaces(client, model).values():
        types = _at(namespace, "worker_types")
        for kind in types if isinstance(types, dict) else ():
            count = _at(types, kind, "workers")
            if not isinstance(count, int):
                return None
            counts[_ROLES.get(str(kind), str(kind))] += count
    return dict(sorted(counts.items(), key=lambda item: (_ORDER.get(item[0], len(_ORDER)), item[0]))) or None


def _namespaces(client: httpx.Client, model: str) -> dict[str, Any]:
    """Dynamo's information about a model's workers, by Dynamo namespace; empty if it reports none."""
    found = _at(_document(client, f"/v1/models/{quote(model, safe='')}/ready"), "namespaces")
    return found if isinstance(found, dict) else {}


def _published(client: httpx.Client, model: str, workers: dict[str, int]) -> tuple[WorkerFacts, ...]:
    """The facts that trtx's workers publish; empty unless they cover all workers of the model."""
    try:
        found = worker_facts.of_body(client.get(worker_facts.PATH).raise_for_status().content) or ()
    except httpx.HTTPError:
        return ()
    facts = tuple(worker.facts for worker in found if worker.model == model)
    return facts if Counter(one.role for one in facts) == workers else ()


def _registered(
    client: httpx.Client, attach: Attach, model: str, workers: dict[str, int] | None
) -> tuple[WorkerFacts, ...]:
    """Like :func:`_published`, but from the model cards in etcd, for frontends that don't expose the facts.

    Raises UsageError if etcd can't be queried, or if it has no worker of the model and is thus the wrong one.
    """
    if workers is None:
        raise UsageError(f"--etcd has no effect with {attach.url}, which does not count its workers; leave it out")
    auth = attach.etcd_files()
    cards = []
    try:
        with Etcd(attach.etcd, None if auth is None else auth.read()) as etcd:
            for namespace in _namespaces(client, model):
                # The records are read once, so the lease's lifetime, which matters only for deletion, isn't needed.
                cards += EtcdRegistry(etcd, namespace, lease_ttl_s=0).cards()
    except RegistryUnknown as error:
        raise UsageError(f"--etcd can't be queried for the workers of {attach.url}: {error}") from error
    cards = [card for card in cards if card.model == model]
    if not cards:
        raise UsageError(
            f"etcd at {', '.join(attach.etcd)} has no worker of {model}, and {attach.url} counts "
            f"{sum(workers.values())}; name the etcd that its frontends use"
        )
    facts = [WorkerFacts.of_runtime_data(card.runtime_data) for card in cards]
    known = tuple(one for one in facts if one is not None)
    return known if Counter(one.role for one in known) == workers else ()


def _versions(published: tuple[WorkerFacts, ...]) -> dict[str, str] | None:
    """Versions by package; joined if workers differ."""
    found: dict[str, set[str]] = {}
    for facts in published:
        for package, version in facts.versions.items():
            found.setdefault(package, set()).add(version)
    return {package: " and ".join(sorted(found[package])) for package in sorted(found)} or None


def _are_deterministic(published: tuple[WorkerFacts, ...]) -> bool | None:
    """Whether all workers that generate are deterministic; encode workers have no batch of answers."""
    known = [facts.deterministic for facts in published if facts.role != "encode"]
    return all(known) if known else None


def _gpu_names(client: httpx.Client, published: tuple[WorkerFacts, ...]) -> tuple[str, ...] | None:
    """GPU names of all workers; None if unknown.

    Dynamo workers without GPUs report that (``device_type``), but no worker reports its number of GPUs. Without facts
    published by trtx, the result is therefore empty or unknown.
    """
    if published:
        of_each = [facts.gpu_names for facts in published]
        return None if None in of_each else tuple(_each_once(published))
    instances = _at(_document(client, "/health"), "instances")
    devices = {_at(one, "device_type") for one in (instances if isinstance(instances, list) else ())}
    return () if devices == {"cpu"} else None


def _each_once(published: tuple[WorkerFacts, ...]) -> Iterator[str]:
    """GPU names, each GPU once if workers that share it report its UUID."""
    seen: set[str] = set()
    for facts in published:
        uuids = facts.gpu_uuids or ()
        for index, name in enumerate(facts.gpu_names or ()):
            if index >= len(uuids) or uuids[index] not in seen:
                yield name
        seen.update(uuids)


def _gpu_count(attach: Attach, names: tuple[str, ...] | None) -> int | None:
    if names is None:
        return attach.gpu_count
    if attach.gpu_count not in (None, len(names)):
        raise UsageError(
            f"--gpu-count is {attach.gpu_count}, and the workers at {attach.url} say that they have {len(names)}; "
            "leave it out"
        )
    return len(names)
