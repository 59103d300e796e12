"""Exported manifests without a cluster: what kubelet and controllers would do with them, as far as Dynamo sees it.

Each container is a process with the manifest's command, arguments and environment, and a loopback address of its own
for its pod. Its readiness probe is asked as the manifest has it, and Services have EndpointSlices of who is ready. A
process that ends is started again. Other than in a cluster: ``python3`` is this interpreter, the paths of mounts lie
below a directory, HTTP listens on the pod's address alone, and UCX takes this machine's device.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from kubernetes_api import KubernetesApi, allowed_by

Manifest = dict[str, Any]
_NUMBERS = itertools.count(1)


@dataclass
class Pod:
    """One pod of a Deployment, and the process of its container."""

    name: str
    address: str
    deployment: Manifest
    log_path: Path
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))
    process: subprocess.Popen[bytes] | None = None
    is_ready: bool = False
    starts: int = 0

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.deployment["spec"]["template"]["metadata"]["labels"]
        return labels

    @property
    def container(self) -> Manifest:
        container: Manifest = self.deployment["spec"]["template"]["spec"]["containers"][0]
        return container

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")


class Cluster:
    """Runs the Deployments of ``manifests`` until it is closed."""

    def __init__(self, manifests: Sequence[Manifest], directory: Path, mounts: dict[str, Path]) -> None:
        self.manifests, self.directory, self.mounts = manifests, directory, mounts
        roles = {role["metadata"]["name"]: allowed_by(role["rules"]) for role in self.of_kind("Role")}
        self.api = KubernetesApi(
            {
                account["name"]: roles[binding["roleRef"]["name"]]
                for binding in self.of_kind("RoleBinding")
                for account in binding["subjects"]
            }
        )
        self._network = f"127.{random.randint(20, 250)}.{random.randint(1, 250)}"
        self._lock = threading.Lock()
        self._is_closed = False
        self.pods = [
            self._pod(deployment, index)
            for deployment in self.of_kind("Deployment")
            for index in range(deployment["spec"]["replicas"])
        ]
        for pod in self.pods:
            self._start(pod)
        self._kubelet = threading.Thread(target=self._run)
        self._kubelet.start()

    def of_kind(self, kind: str) -> list[Manifest]:
        return [one for one in self.manifests if one["kind"] == kind]

    def of_role(self, role: str) -> list[Pod]:
        return [pod for pod in self.pods if pod.labels["trtx-role"] == role]

    @property
    def url(self) -> str:
        """Of the first frontend's pod."""
        [frontend, *_] = self.of_role("frontend")
        scheme = frontend.container["readinessProbe"]["httpGet"]["scheme"].lower()
        return f"{scheme}://{frontend.address}:8000"

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._kubelet.join()
        stuck = []
        for pod in self.pods:
            if pod.process is not None and pod.process.poll() is None:
                pod.process.send_signal(signal.SIGTERM)
        for pod in self.pods:
            try:
                pod.process and pod.process.wait(20)
            except subprocess.TimeoutExpired:
                pod.process.kill()
                pod.process.wait()
                stuck.append(f"{pod.name} did not end:\n{pod.log()[-2000:]}")
        self.api.close()
        assert not stuck, "\n".join(stuck)

    def _pod(self, deployment: Manifest, index: int) -> Pod:
        name = f"{deployment['metadata']['name']}-{index}"
        return Pod(name, f"{self._network}.{next(_NUMBERS) % 250 + 1}", deployment, self.directory / f"{name}.log")

    def _start(self, pod: Pod) -> None:
        container = pod.container
        command = [*container["command"], *container["args"]]
        words = [self._word(word, pod) for word in command]
        words[0] = sys.executable
        with pod.log_path.open("ab") as out:
            pod.process = subprocess.Popen(
                words,
                env=self._environment(pod),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        pod.starts += 1

    def run_once(
        self, container: Manifest, further: dict[str, Path], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """One container of a Job, to its end. The Service is the first frontend's address; ``further``: mounts."""
        [service] = [
            one["metadata"]["name"] for one in self.of_kind("Service") if "frontend" in one["metadata"]["name"]
        ]
        words = [*container["command"], *container["args"]]
        for index, word in enumerate(words):
            if f"//{service}." in word:
                words[index] = self.url
            for mount, path in {**self.mounts, **further}.items():
                words[index] = (
                    words[index].replace(mount, str(path)) if words[index].startswith(mount) else words[index]
                )
        values = {one["name"]: one["value"] for one in container.get("env", ())}
        for name, value in values.items():
            for mount, path in self.mounts.items():
                values[name] = values[name].replace(mount, str(path)) if value.startswith(mount) else values[name]
        return subprocess.run(
            [sys.executable, *words[1:]],
            env={**os.environ, **values},
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def _word(self, word: str, pod: Pod) -> str:
        for mount, path in self.mounts.items():
            if word.startswith(mount):
                return f"{path}{word.removeprefix(mount)}"
        word = pod.address if word == "0.0.0.0" else word
        return word.replace("$(POD_NAME)", pod.name).replace("$$(", "$(")

    def _environment(self, pod: Pod) -> dict[str, str]:
        fields = {
            "metadata.name": pod.name,
            "metadata.namespace": pod.deployment["metadata"]["namespace"],
            "metadata.uid": pod.uid,
            "status.podIP": pod.address,
        }
        inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
        given = {
            one["name"]: one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in pod.container["env"]
        }
        temporary = self.directory / f"{pod.name}.tmp"
        temporary.mkdir(exist_ok=True)
        return {**inherited, **given, "KUBECONFIG": str(self._kubeconfig(pod)), "TMPDIR": str(temporary)}

    def _kubeconfig(self, pod: Pod) -> Path:
        account = pod.deployment["spec"]["template"]["spec"]["serviceAccountName"]
        named = {"cluster": "stub", "user": "pod", "namespace": "default"}
        path = self.directory / f"{account}.yaml"
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "stub", "cluster": {"server": self.api.url}}],
                    "users": [{"name": "pod", "user": {"token": account}}],
                    "contexts": [{"name": "stub", "context": named}],
                    "current-context": "stub",
                }
            )
        )
        return path

    # --- kubelet and controllers ---

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._is_closed:
                    return
            for pod in self.pods:
                assert pod.process is not None
                if pod.process.poll() is not None:  # restartPolicy of a Deployment: always
                    self._tell(pod, is_ready=False)
                    self._start(pod)
                self._tell(pod, is_ready=self.probe(pod, "readinessProbe") == 200)
            time.sleep(0.05)

    def probe(self, pod: Pod, name: str) -> int | None:
        """The status of its answer; None: there is none."""
        get = pod.container[name]["httpGet"]
        url = f"{get['scheme'].lower()}://{pod.address}:{get['port']}{get['path']}"
        try:
            return httpx.get(url, timeout=5, verify=False).status_code
        except httpx.TransportError:
            return None

    def _tell(self, pod: Pod, *, is_ready: bool) -> None:
        """Into the EndpointSlice of every Service that selects it, where it is another answer than before."""
        if pod.is_ready == is_ready:
            return
        pod.is_ready = is_ready
        for service in self.of_kind("Service"):
            selector = service["spec"]["selector"]
            if not selector.items() <= pod.labels.items():
                continue
            chosen = [one for one in self.pods if selector.items() <= one.labels.items() and one.starts]
            self.api.put(
                "endpointslices",
                f"{service['metadata']['name']}-abc",
                {
                    "metadata": {
                        "namespace": service["metadata"]["namespace"],
                        "labels": service["metadata"]["labels"],
                    },
                    "addressType": "IPv4",
                    "endpoints": [
                        {
                            "addresses": [one.address],
                            "conditions": {"ready": one.is_ready, "serving": one.is_ready, "terminating": False},
                            "targetRef": {"kind": "Pod", "name": one.name, "namespace": "default", "uid": one.uid},
                        }
                        for one in chosen
                    ],
                    "ports": [{"name": port["name"], "port": port["port"]} for port in service["spec"]["ports"]],
                },
            )


@contextlib.contextmanager
def cluster(manifests: Sequence[Manifest], directory: Path, model: Path) -> Iterator[Cluster]:
    """Of exported manifests: their ConfigMap's files and ``model`` are what its containers find mounted."""
    configs = directory / "configs"
    configs.mkdir(parents=True)
    for manifest in manifests:
        if manifest["kind"] == "ConfigMap":
            for name, text in manifest["data"].items():
                (configs / name).write_text(text, encoding="utf-8")
    mounts = {"/run/trtx/serve/configs": configs, "/models/model": model, "/run/trtx-tls": directory / "tls"}
    running = Cluster(manifests, directory, mounts)
    try:
        yield running
    finally:
        running.close()
