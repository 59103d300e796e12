"""Exported manifests run for real: Dynamo's own Kubernetes discovery against a stub of the API server."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import psutil
import pytest
import yaml
from called import call
from dynamo_operator import WORKER_SUFFIX, made_by_the_operator
from kubernetes_api import allowed_by
from kubernetes_cluster import Cluster, Manifest, Pod, cluster
from processes import HTTP, until

from trtx.checkpoint import resolve_checkpoint
from trtx.errors import LaunchError
from trtx.export.wait import wait

CHECKPOINT = "synthetic:tiny-trained"
MODEL = "org/tiny"  # in the path of a probe it is org%2Ftiny
ADDRESSES = {name: found for name, found in psutil.net_if_addrs().items() if name != "lo"}
DEVICE = next((name for name, found in ADDRESSES.items() if any(one.family.name == "AF_INET" for one in found)), None)


def exported(*typed: str) -> list[Manifest]:
    device = ("--ucx-devices", DEVICE) if DEVICE else ()
    done = call(
        *("export", "kubernetes", "--image", "reg/trtx:1.4.2", "--model", CHECKPOINT, "--served-model-name", MODEL),
        *("--name", "shown", "--gpus-per-node", "0", "--cpu", "1", *device, *typed),
    )
    assert done.code == 0, done.err
    return list(yaml.safe_load_all(done.out))


def model() -> Path:
    return resolve_checkpoint(CHECKPOINT).path


def complete(frontend: str, prompt: str, tokens: int = 8) -> Any:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    return HTTP.post(f"{frontend}/v1/completions", json=body, timeout=60)


def wait_for(running: Cluster, **workers: int) -> None:
    """What the Job of a measurement waits for, and that every pod is ready."""
    until("every pod is ready", lambda: all(pod.is_ready for pod in running.pods))
    wait(running.url, MODEL, workers, timeout_s=60)


def metric(pod: Pod, name: str) -> float:
    text = HTTP.get(f"http://{pod.address}:9090/metrics", timeout=10).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(rf"{name}\b", line))


def listening(pod: Pod) -> set[str]:
    """Addresses on which the pod's process listens."""
    assert pod.process is not None
    lines = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[3].rpartition(":")[0] for line in lines if re.search(rf"pid={pod.process.pid}\b", line)}


def test_the_plain_form_serves_with_exactly_the_roles_that_it_brings(tmp_path: Path) -> None:
    manifests = exported("--plain", "--engine", "paced", "--workers", "2")
    with cluster(manifests, tmp_path, model()) as running:
        [frontend] = running.of_role("frontend")
        until("the frontend answers", lambda: running.probe(frontend, "livenessProbe") == 200)
        before = until("the frontend says whether it serves", lambda: running.probe(frontend, "readinessProbe"))
        assert before in (404, 200)
        wait_for(running, agg=2)
        assert running.probe(frontend, "readinessProbe") == 200
        answers = [complete(running.url, "hello") for _ in range(4)]
        assert [one.status_code for one in answers] == [200] * 4
        assert len({one.json()["choices"][0]["text"] for one in answers}) == 1
        assert not running.api.refused
        roles = {one["metadata"]["name"]: allowed_by(one["rules"]) for one in manifests if one["kind"] == "Role"}
        assert running.api.asked == roles
        for pod in running.of_role("agg"):
            # Dynamo 1.6.1 binds the publisher of events on every address; the NetworkPolicy keeps others out
            assert listening(pod) == {pod.address, "0.0.0.0"}
        facts = running.api.get("dynamoworkermetadatas", "shown-agg-0")
        assert facts is not None and "'name': 'shown-agg-0'" in str(facts["spec"])
        published = HTTP.get(f"{running.url}/trtx/workers", timeout=10).json()
        assert [one["facts"]["name"] for one in published] == ["shown-agg-0", "shown-agg-1"]
        with pytest.raises(LaunchError, match="2 of 3 agg"):
            wait(running.url, MODEL, {"agg": 3}, timeout_s=0)


@pytest.mark.proof
def test_the_graph_serves_with_what_the_operator_adds(tmp_path: Path) -> None:
    manifests = exported("--engine", "paced", "--mode", "disagg", "--decode", "2")
    [graph] = [one for one in manifests if one["kind"] == "DynamoGraphDeployment"]
    made = [*(one for one in manifests if one["kind"] == "ConfigMap"), *made_by_the_operator(graph)]
    with cluster(made, tmp_path, model()) as running:
        wait_for(running, prefill=1, decode=2)
        assert complete(running.url, "hello").status_code == 200
        document = HTTP.get(f"{running.url}/v1/models/{quote(MODEL, safe='')}/ready", timeout=10).json()
        assert list(document["namespaces"]) == [f"default-shown-{WORKER_SUFFIX}"]


@pytest.mark.proof
@pytest.mark.skipif(DEVICE is None, reason="no network device but lo, and UCX is told of another")
def test_kv_goes_between_pods_and_no_prompt_is_computed_twice(tmp_path: Path) -> None:
    prompts = [f"the quick brown fox {'jumps over ' * (10 + index)}" for index in range(6)]
    with cluster(exported("--plain", "--engine", "torch"), tmp_path / "agg", model()) as running:
        wait_for(running, agg=1)
        wanted = [complete(running.url, prompt).json()["choices"][0]["text"] for prompt in prompts]
    manifests = exported("--plain", "--engine", "torch", "--mode", "disagg", "--bench", "--concurrency 1 --isl 16")
    [job] = [one["spec"]["template"]["spec"] for one in manifests if one["kind"] == "Job"]
    with cluster(manifests, tmp_path / "disagg", model()) as running:
        wait_for(running, prefill=1, decode=1)
        done = running.run_once(job["initContainers"][1], {}, 90)
        assert done.returncode == 0 and "one request went through, and KV in its pair of workers" in done.stderr
        assert [complete(running.url, prompt).json()["choices"][0]["text"] for prompt in prompts] == wanted
        [decode] = running.of_role("decode")
        assert metric(decode, "trtx_handoff_reads_total") >= len(prompts)
        assert metric(decode, "trtx_handoff_bytes_total") > 0
        assert metric(decode, "trtx_recomputed_prefixes_total") == 0


@pytest.mark.proof
def test_kv_routers_know_what_workers_hold_and_each_other(tmp_path: Path) -> None:
    prefixes = [f"word{index} " * 60 for index in range(8)]
    rounds = 6
    manifests = exported("--plain", "--engine", "torch", "--workers", "2", "--router-mode", "kv", "--frontends", "2")
    with cluster(manifests, tmp_path, model()) as running:
        wait_for(running, agg=2)
        assert not running.api.refused
        for _ in range(rounds):
            for index, prefix in enumerate(random.sample(prefixes, len(prefixes))):
                frontend = running.of_role("frontend")[index % 2]
                assert complete(f"http://{frontend.address}:8000", prefix, 1).status_code == 200
        hits = sum(metric(pod, "trtx_cached_tokens_total") for pod in running.of_role("agg"))
        once = complete(running.url, prefixes[0], 1).json()["usage"]["prompt_tokens"]
        most = len(prefixes) * (rounds - 1) * (once // 32) * 32
        assert hits >= 0.9 * most, f"{hits} of {most} tokens were cached"
        processes = {pod.process.pid: pod.name for pod in running.of_role("frontend") if pod.process}
        heard = _connections(processes)
        assert {("shown-frontend-0", "shown-frontend-1"), ("shown-frontend-1", "shown-frontend-0")} <= heard


def _connections(processes: dict[int, str]) -> set[tuple[str, str]]:
    """Which of them is connected to a port on which another listens."""

    def lines(flags: str) -> list[tuple[str, str, int]]:
        shown = subprocess.run(["ss", flags], capture_output=True, text=True, check=True).stdout.splitlines()
        found = [(line.split()[3], line.split()[4], re.search(r"pid=(\d+)", line)) for line in shown if line.strip()]
        return [(own, peer, int(pid[1])) for own, peer, pid in found if pid]

    owners = {own.rpartition(":")[2]: processes[pid] for own, _, pid in lines("-Hltnp") if pid in processes}
    return {
        (processes[pid], owners[port])
        for _, peer, pid in lines("-Htnp")
        if pid in processes and (port := peer.rpartition(":")[2]) in owners
    }


@pytest.mark.proof
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_pod_that_ends_costs_no_request_where_another_serves(number: signal.Signals, tmp_path: Path) -> None:
    manifests = exported("--plain", "--engine", "paced", "--workers", "2", "--set", "paced_itl_ms=20")
    with cluster(manifests, tmp_path, model()) as running:
        wait_for(running, agg=2)
        statuses: list[int | str] = []

        def ask(index: int) -> None:
            try:
                statuses.append(complete(running.url, f"hello {index}", 40).status_code)
            except httpx.HTTPError as error:
                statuses.append(repr(error))

        asking = [threading.Thread(target=ask, args=(index,)) for index in range(60)]
        for index, thread in enumerate(asking):
            thread.start()
            if index == 20:
                process = running.of_role("agg")[0].process
                assert process is not None
                os.killpg(process.pid, number)
            threading.Event().wait(0.05)
        for thread in asking:
            thread.join()
        assert statuses == [200] * len(asking)
        until("it was started again", lambda: running.of_role("agg")[0].starts == 2)
        wait_for(running, agg=2)


def certify(directory: Path, names: str) -> None:
    """What a secret of type kubernetes.io/tls holds, for ``names`` (subjectAltName), signed by itself."""
    directory.mkdir()
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=shown"]
    command += ["-addext", f"subjectAltName={names}", "-keyout", "tls.key", "-out", "tls.crt"]
    subprocess.run(command, cwd=directory, check=True, capture_output=True)
    (directory / "ca.crt").write_bytes((directory / "tls.crt").read_bytes())


@pytest.mark.proof
@pytest.mark.parametrize("tls", [(), ("--tls-secret", "front-door")], ids=["http", "https"])
def test_the_job_waits_measures_and_leaves_its_report(tls: tuple[str, ...], tmp_path: Path) -> None:
    bench = "--concurrency 2 --isl 32 --osl 8 --request-count 8 --warmup-request-count 1"
    manifests = exported("--plain", "--engine", "paced", *tls, "--bench", bench)
    [job] = [one["spec"]["template"]["spec"] for one in manifests if one["kind"] == "Job"]
    fetching, waiting = job["initContainers"]
    [measuring] = job["containers"]
    with cluster(manifests, tmp_path, model()) as running:
        fetched = {"/models": tmp_path / "models"}
        running.mounts.pop("/models/model")
        done = running.run_once(fetching, fetched, 60)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "models" / "model" / "tokenizer.json").is_file()
        if tls:
            certify(tmp_path / "tls", f"IP:{running.of_role('frontend')[0].address}")
        done = running.run_once(waiting, {}, 90)
        assert done.returncode == 0, done.stderr
        runs = tmp_path / "runs"
        done = running.run_once(measuring, {**fetched, "/runs": runs}, 240)
        assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
        [report] = runs.glob("*/report.html")
        assert report.stat().st_size > 0
