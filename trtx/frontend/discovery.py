"""Opens the discovery that this process's Dynamo uses, by its environment, and reads facts about workers from it."""

from __future__ import annotations

import socket
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
_KEPT_S = 0.5
_DYNAMOS_LEASE_TTL_S = "10"
_OTHER_COMPONENTS = ("prefill", "encode")
"""Dynamo's components of workers that generate no text, as ``trtx.worker.engine`` names them."""


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


def lacks_generator(registry: Registry) -> bool:
    """Whether no worker that generates text is left: none is registered, or none keeps a connection.

    A dead worker remains registered until the launcher has seen its death. Raises OSError if discovery can't be read.
    """
    generators = (one for one in registry.instances() if one.component not in _OTHER_COMPONENTS)
    return not any(_keeps_connection(one.host, one.port) for one in generators)


def _keeps_connection(host: str, port: int) -> bool:
    """Whether a worker lives there. The port of one that is being killed still takes connections, and resets them."""
    try:
        connection = socket.create_connection((host, port), _TIMEOUT_S)
    except OSError:
        return False
    with connection:
        connection.settimeout(_KEPT_S)
        try:
            return connection.recv(1) != b""  # a worker sends nothing before it has a request
        except TimeoutError:
            return True
        except OSError:
            return False


def worker_context(registry: Registry) -> int:
    """The largest context of the registered workers that generate text, in tokens of prompt and output; 0 if none
    states it.

    Raises OSError if discovery can't be read.
    """
    facts = (WorkerFacts.of_runtime_data(card.runtime_data) for card in registry.cards())
    return max((one.context_length for one in facts if one is not None and one.role != "encode"), default=0)
