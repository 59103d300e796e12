"""A route of the frontend that lists its workers with the facts that they publish (``trtx.engine.worker_facts``).

Dynamo 1.6.1 counts workers (``/v1/models/<name>/ready``) and lists their addresses (``/health``), but does not show
their runtime data. It accepts additional routes (``--frontend-route-extension``), but gives their handlers no model
cards. So this module reads the cards from Dynamo's discovery, which it finds in the frontend's environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dynamo.llm import FrontendExtensionContext, FrontendResponse, FrontendRoute

from trtx.engine.worker_facts import PATH, PublishedWorker, WorkerFacts, to_body
from trtx.planes.credentials import EtcdSecrets
from trtx.planes.etcd import Etcd
from trtx.planes.etcd_registry import EtcdRegistry
from trtx.planes.file_registry import FileRegistry
from trtx.planes.kubernetes_registry import KubernetesRegistry
from trtx.planes.registry import Registry

_TIMEOUT_S = 1.0  # the frontend waits for its handlers
_DYNAMOS_LEASE_TTL_S = "10"


def routes() -> list[FrontendRoute]:
    """The routes to add; dynamo.frontend calls this once at its start."""
    registry = registry_of_environment(os.environ)
    if registry is None:
        return []

    def answer(context: FrontendExtensionContext) -> object:
        try:
            return to_body(published_workers(registry))
        except OSError as error:
            return FrontendResponse(503, {"error": str(error)})

    return [FrontendRoute("GET", PATH, answer)]


def registry_of_environment(environment: Mapping[str, str]) -> Registry | None:
    """The discovery that this process's Dynamo uses; None if trtx can't read it."""
    backend, namespace = environment.get("DYN_DISCOVERY_BACKEND"), environment.get("DYN_NAMESPACE")
    if backend == "file" and (directory := environment.get("DYN_FILE_KV")) is not None:
        return FileRegistry(Path(directory))
    if backend == "etcd" and namespace is not None and (endpoints := environment.get("ETCD_ENDPOINTS")) is not None:
        etcd = Etcd(
            [endpoint.strip() for endpoint in endpoints.split(",")],
            EtcdSecrets.of_environment(environment),
            timeout_s=_TIMEOUT_S,
        )
        lease_ttl_s = float(environment.get("ETCD_LEASE_TTL", _DYNAMOS_LEASE_TTL_S))
        return EtcdRegistry(etcd, namespace, lease_ttl_s=lease_ttl_s)
    if backend == "kubernetes" and namespace is not None and (pods := environment.get("POD_NAMESPACE")) is not None:
        prefix = environment.get("DYN_NAMESPACE_PREFIX")
        return KubernetesRegistry(pods, prefix or namespace, is_prefix=prefix is not None, timeout_s=_TIMEOUT_S)
    return None


def published_workers(registry: Registry) -> tuple[PublishedWorker, ...]:
    """The registered workers of trtx, sorted by name. Raises OSError if discovery can't be read."""
    found = []
    for card in registry.cards():
        if (facts := WorkerFacts.of_runtime_data(card.runtime_data)) is not None:
            found.append(PublishedWorker(card.worker_id, card.model, facts))
    return tuple(sorted(found, key=lambda worker: (worker.facts.name, worker.worker_id)))
