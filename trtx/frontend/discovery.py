"""Opens the discovery that this process's Dynamo uses, by its environment, and reads the workers' slots from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trtx.engine.worker_facts import WorkerFacts
from trtx.planes.credentials import EtcdSecrets
from trtx.planes.etcd import Etcd
from trtx.planes.etcd_registry import EtcdRegistry
from trtx.planes.file_registry import FileRegistry
from trtx.planes.kubernetes_registry import KubernetesRegistry
from trtx.planes.registry import Registry

_TIMEOUT_S = 1.0  # the frontend waits for its handlers
_DYNAMOS_LEASE_TTL_S = "10"


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


def worker_slots(registry: Registry) -> int:
    """Number of requests that the registered workers compute at once: the sum over those that generate text.

    Raises OSError if discovery can't be read.
    """
    return sum(card.slots for card in registry.cards())


def worker_context(registry: Registry) -> int:
    """The largest context of the registered workers that generate text, in tokens of prompt and output; 0 if none
    states it.

    Raises OSError if discovery can't be read.
    """
    facts = (WorkerFacts.of_runtime_data(card.runtime_data) for card in registry.cards())
    return max((one.context_length for one in facts if one is not None and one.role != "encode"), default=0)
