"""Reads Dynamo's discovery records in Kubernetes, from a process that is not part of Dynamo.

Each process of Dynamo (seen with 1.4.2) creates one ``DynamoWorkerMetadata`` object (``nvidia.com/v1alpha1``), named
like its pod. The object contains the process's endpoints and model cards, under the same keys as in etcd. Frontends
route to workers whose pod is a ready endpoint of an EndpointSlice with the label
``nvidia.com/dynamo-discovery-enabled``. There is no lease: Kubernetes deletes the object together with its pod
(ownerReference), and frontends stop routing to a pod within half a second after it is no longer ready. To remove a
worker, delete its object. That needs a role with the permission to delete it, which Dynamo's own processes don't need.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trtx.planes.registry import Card, Instance, RegistryUnknown, read_card, read_instance

_METADATA = ("nvidia.com", "v1alpha1", "dynamoworkermetadatas")
_SLICES = ("discovery.k8s.io", "v1", "endpointslices")
_LABEL = "nvidia.com/dynamo-discovery-enabled=true"


class KubernetesRegistry:
    """One topology's records in Kubernetes. Each call sends a request to the API server.

    The server's address comes from a kubeconfig file or the pod's service account. See
    :class:`~trtx.planes.registry.Registry`.
    """

    records_live_s = 0.0  # until the pod is deleted

    def __init__(
        self, kubernetes_namespace: str, namespace: str, *, is_prefix: bool = False, timeout_s: float = 2.0
    ) -> None:
        """Sends no request yet. ``timeout_s``: per request.

        ``namespace``: the Dynamo namespace. ``is_prefix``: include all namespaces that begin with ``namespace``,
        because the operator creates such namespaces for the workers of a rolling update.
        """
        self._pods = kubernetes_namespace
        self._namespace = namespace
        self._is_prefix = is_prefix
        self._timeout_s = timeout_s
        self._api: Any = None
        self._lock = threading.Lock()

    def instances(self) -> list[Instance]:
        return [instance for instance, _ in self._instances()]

    def worker_ids(self) -> set[int]:
        """Ids of the workers that have a model card and whose pod is ready."""
        ready, cards = self._ready_pods(), {card.worker_id for card in self.cards()}
        return {
            instance.worker_id for instance, pod in self._instances() if pod in ready and instance.worker_id in cards
        }

    def cards(self) -> list[Card]:
        found = []
        for _, record in self._records("model_cards"):
            with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
                found.append(read_card(record))
        return found

    def renewed_at(self, worker_id: int) -> float | None:
        """None: records are not renewed."""
        return None

    def remove(self, worker_id: int) -> None:
        """Deletes the object of the worker's pod. The object contains no records of other workers."""
        for pod in {pod for instance, pod in self._instances() if instance.worker_id == worker_id}:
            with self._asking() as api:
                group, version, plural = _METADATA
                try:
                    api.delete_namespaced_custom_object(
                        group, version, self._pods, plural, pod, _request_timeout=self._timeout_s
                    )
                except Exception as error:
                    if getattr(error, "status", None) != 404:  # 404: it is gone already
                        raise

    def close(self) -> None:
        with self._lock:
            if self._api is not None:
                self._api.api_client.close()
                self._api = None

    def _instances(self) -> Iterator[tuple[Instance, str]]:
        """Each instance with its pod."""
        for pod, record in self._records("endpoints"):
            with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
                if (instance := read_instance(record)) is not None:
                    yield instance, pod

    def _records(self, bucket: str) -> Iterator[tuple[str, Any]]:
        for one in self._listed(_METADATA):
            with contextlib.suppress(LookupError, TypeError, AttributeError):
                pod, records = str(one["metadata"]["name"]), one["spec"]["data"].get(bucket) or {}
                for record in records.values():
                    if self._is_ours(str(record["namespace"])):
                        yield pod, record

    def _is_ours(self, namespace: str) -> bool:
        return namespace.startswith(self._namespace) if self._is_prefix else namespace == self._namespace

    def _ready_pods(self) -> set[str]:
        found = set()
        for one in self._listed(_SLICES, label_selector=_LABEL):
            for endpoint in one.get("endpoints") or ():
                # Kubernetes defines null as ready.
                if (endpoint.get("conditions") or {}).get("ready") is not False:
                    found.add(str((endpoint.get("targetRef") or {}).get("name")))
        return found

    def _listed(self, resource: tuple[str, str, str], **selector: str) -> list[Any]:
        group, version, plural = resource
        with self._asking() as api:
            answer = api.list_namespaced_custom_object(
                group, version, self._pods, plural, _request_timeout=self._timeout_s, **selector
            )
        items = answer.get("items") if isinstance(answer, dict) else None
        return items if isinstance(items, list) else []

    @contextlib.contextmanager
    def _asking(self) -> Iterator[Any]:
        """Provides the API client. Converts its exceptions, which come from several packages, to RegistryUnknown."""
        with self._lock:
            try:
                if self._api is None:
                    self._api = _connect()
                yield self._api
            except Exception as error:
                status = getattr(error, "status", None)
                reason = f"{status} {getattr(error, 'reason', '')}" if status else str(error) or type(error).__name__
                raise RegistryUnknown(
                    f"Kubernetes' API server can't be queried ({' '.join(reason.split())})"
                ) from error


def _connect() -> Any:
    """Creates the API client from the first of ``KUBECONFIG``, ``~/.kube/config`` and the pod's service account.

    Dynamo uses the same order.
    """
    from kubernetes import client, config  # imported here because it takes half a second of CPU time

    file = Path(os.environ.get("KUBECONFIG") or Path.home() / ".kube" / "config")
    configuration = client.Configuration()
    if file.is_file():
        config.load_kube_config(config_file=str(file), client_configuration=configuration)
    else:
        config.load_incluster_config(client_configuration=configuration)
    configuration.retries = 0  # callers need an answer in time, and retry themselves
    return client.CustomObjectsApi(client.ApiClient(configuration))
