"""Dynamo's discovery in Kubernetes, as seen from outside.

In Dynamo 1.4.2 each process applies one ``DynamoWorkerMetadata`` (``nvidia.com/v1alpha1``) called as its pod, with its
endpoints and model cards under the keys that it has in etcd; frontends route to those whose pod is a ready endpoint of
a slice labelled ``nvidia.com/dynamo-discovery-enabled``. There is no lease: the object goes with its pod, by its
ownerReference, and a pod that is not ready is out after half a second. So to delete the object takes a worker out, and
needs a role that may; Dynamo's own processes need none that does.
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
    """One topology's records. Each question asks the API server, as ``KUBECONFIG`` or the pod's account has it. See
    :class:`~trtx.planes.registry.Registry`."""

    records_live_s = 0.0  # until their pod is deleted

    def __init__(
        self, kubernetes_namespace: str, namespace: str, *, is_prefix: bool = False, timeout_s: float = 2.0
    ) -> None:
        """Asks nothing yet. ``namespace``: Dynamo's; ``is_prefix``: and all that begin with it, as the operator gives
        the workers of a rolling update. ``timeout_s`` bounds each question."""
        self._pods = kubernetes_namespace
        self._namespace = namespace
        self._is_prefix = is_prefix
        self._timeout_s = timeout_s
        self._api: Any = None
        self._lock = threading.Lock()

    def instances(self) -> list[Instance]:
        return [instance for instance, _ in self._instances()]

    def worker_ids(self) -> set[int]:
        """Those with a model card whose pod is ready."""
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
        """Nothing is renewed."""
        return None

    def remove(self, worker_id: int) -> None:
        """Deletes the object of its pod, which holds nobody else's records."""
        for pod in {pod for instance, pod in self._instances() if instance.worker_id == worker_id}:
            with self._asking() as api:
                group, version, plural = _METADATA
                try:
                    api.delete_namespaced_custom_object(
                        group, version, self._pods, plural, pod, _request_timeout=self._timeout_s
                    )
                except Exception as error:
                    if getattr(error, "status", None) != 404:  # else it has gone since
                        raise

    def close(self) -> None:
        with self._lock:
            if self._api is not None:
                self._api.api_client.close()
                self._api = None

    def _instances(self) -> Iterator[tuple[Instance, str]]:
        """With the pod of each."""
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
                # Kubernetes: null is to be taken for ready.
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
        """Its client raises errors of several packages; each of them means that nothing is known."""
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
    """By ``KUBECONFIG``, the user's own file, or the account of the pod that this runs in: in Dynamo's order."""
    from kubernetes import client, config  # half a second of CPU, and only here

    file = Path(os.environ.get("KUBECONFIG") or Path.home() / ".kube" / "config")
    configuration = client.Configuration()
    if file.is_file():
        config.load_kube_config(config_file=str(file), client_configuration=configuration)
    else:
        config.load_incluster_config(client_configuration=configuration)
    configuration.retries = 0  # whoever asks has to be answered in time, and asks again
    return client.CustomObjectsApi(client.ApiClient(configuration))
