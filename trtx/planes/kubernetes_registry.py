"""Dynamo's discovery in Kubernetes, read from outside.

In Dynamo 1.4.2, each process applies one ``DynamoWorkerMetadata`` (``nvidia.com/v1alpha1``) with its pod's name, which
contains its endpoints and model cards under the same keys as in etcd. Frontends route to those whose pod is a ready
endpoint of a slice labelled ``nvidia.com/dynamo-discovery-enabled``. There is no lease: the object is deleted with its
pod through its ownerReference, and a pod that is not ready leaves the routing within half a second. So deleting the
object removes a worker, which requires a role with that permission; Dynamo's own processes need no such permission.
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
    """One topology's records in Kubernetes. Each call asks the API server.

    The server comes from ``KUBECONFIG`` or the pod's account. See :class:`~trtx.planes.registry.Registry`.
    """

    records_live_s = 0.0  # until the pod is deleted

    def __init__(
        self, kubernetes_namespace: str, namespace: str, *, is_prefix: bool = False, timeout_s: float = 2.0
    ) -> None:
        """Sends no request yet. ``timeout_s``: per request.

        ``namespace``: Dynamo's. ``is_prefix``: includes all namespaces that begin with it, which the operator creates
        for the workers of a rolling update.
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
        """Workers with a model card whose pod is ready."""
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
        """Deletes the object of the worker's pod, which contains no other worker's records."""
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
        """The API client. Its exceptions come from several packages; each is converted to RegistryUnknown."""
        with self._lock:
            try:
                if self._api is None:
                    self._api = _connect()
                yield self._api
            except Exception as error:
                status = getattr(error, "status", None)
                reason = f"{status} {getattr(error, 'reason', '')}" if status else str(error) or type(error).__name__
                raise RegistryUnknown(f"Kubernetes' API server can't be asked ({' '.join(reason.split())})") from error


def _connect() -> Any:
    """Connects with ``KUBECONFIG``, the user's own file, or the pod's service account, in the same order as Dynamo."""
    from kubernetes import client, config  # imported here because it takes half a second of CPU time

    file = Path(os.environ.get("KUBECONFIG") or Path.home() / ".kube" / "config")
    configuration = client.Configuration()
    if file.is_file():
        config.load_kube_config(config_file=str(file), client_configuration=configuration)
    else:
        config.load_incluster_config(client_configuration=configuration)
    configuration.retries = 0  # callers need an answer in time, and retry themselves
    return client.CustomObjectsApi(client.ApiClient(configuration))
