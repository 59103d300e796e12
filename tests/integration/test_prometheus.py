"""Prometheus takes the exported files, and their rules raise each alert when, and only when, they should."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from called import call
from processes import until
from prometheus_process import Prometheus, run_promtool, running_prometheus
from topology_clients import post, trtx_serve

from trtx.config import TopologySpec
from trtx.export.files import write_files
from trtx.export.monitoring.exported import prometheus_files
from trtx.export.monitoring.rules import ALERTS, FILE, rule_file
from trtx.export.monitoring.scrape import KubernetesPods
from trtx.launch.preparation import HOLDER, prepare
from trtx.topology import Plan

WORKER = 'topology="t", role="decode", name="decode-0"'
GPU = f'{WORKER}, gpu="0", uuid="GPU-a"'
HANDOFFS = ("trtx_handoff_failed_reads_total", "trtx_recomputed_prefixes_total", "trtx_expired_leases_total")
MINUTES, PER_MINUTE = 10, 4  # of a case, and its samples


def series(name: str, labels: str, values: str) -> dict[str, str]:
    return {"series": f"{name}{{{labels}}}", "values": values}


def steady(name: str, labels: str, value: float = 0) -> dict[str, str]:
    return series(name, labels, f"{value}x{PER_MINUTE * MINUTES}")


def rising(name: str, labels: str, each: float, start: float = 0) -> dict[str, str]:
    return series(name, labels, f"{start}+{each}x{PER_MINUTE * MINUTES}")


def frontend_requests(good: float, bad: float, kind: str = "internal") -> list[dict[str, str]]:
    common = 'topology="t", role="frontend", name="frontend", model="m", endpoint="chat", request_type="unary"'
    return [
        rising("dynamo_frontend_requests_total", f'{common}, status="success", error_type=""', good),
        rising("dynamo_frontend_requests_total", f'{common}, status="error", error_type="{kind}"', bad),
    ]


def handoffs(failing: str = "") -> list[dict[str, str]]:
    return [rising(name, WORKER, 0.1 if name == failing else 0) for name in HANDOFFS]


def kv(used: float, queued: float) -> list[dict[str, str]]:
    tier = f'{WORKER}, tier="gpu"'
    blocks = [steady("trtx_kv_blocks", tier, 100), steady("trtx_kv_blocks_used", tier, used)]
    return [*blocks, steady("trtx_queued_requests", WORKER, queued)]


def throttled(reason: str, value: float) -> list[dict[str, str]]:
    return [steady("trtx_gpu_clock_reason", f'{GPU}, reason="{reason}"', value)]


def ecc(kind: str, each: float) -> list[dict[str, str]]:
    return [rising("trtx_gpu_ecc_errors_total", f'{GPU}, type="{kind}"', each, start=7)]


def started(*worker_ids: str) -> list[dict[str, str]]:
    """Start times of a worker that Dynamo knew by these ids, one after the other."""
    half = PER_MINUTE * MINUTES // 2
    values = [f"100x{half} _x{half}", f"_x{half} 400x{half}"] if len(worker_ids) > 1 else [f"100x{2 * half}"]
    return [
        series("process_start_time_seconds", f'{WORKER}, process="worker", worker_id="{one}"', value)
        for one, value in zip(worker_ids, values, strict=True)
    ]


# Alert -> what raises it after 9 minutes, and what does not. A sample each 15 s.
CASES: dict[str, tuple[list[list[dict[str, str]]], list[list[dict[str, str]]]]] = {
    "TrtxWorkerDown": ([[steady("up", WORKER, 0)]], [[steady("up", WORKER, 1)], [steady("up", 'job="other"', 0)]]),
    "TrtxFrontendDown": (
        [[steady("up", 'topology="t", role="frontend", name="frontend"', 0)]],
        [[steady("up", WORKER, 0)]],
    ),
    "TrtxWorkerRestarted": ([started("a", "b")], [started("a")]),
    "TrtxQueueGrowing": (
        [[rising("trtx_queued_requests", WORKER, 1, start=1)]],
        [
            [steady("trtx_queued_requests", WORKER, 9)],
            [series("trtx_queued_requests", WORKER, "0 1 2 3 " * MINUTES)],
        ],
    ),
    "TrtxKvFull": ([kv(96, queued=1)], [kv(96, queued=0), kv(90, queued=5)]),
    "TrtxHandoffFailures": ([handoffs(one) for one in HANDOFFS], [handoffs()]),
    "TrtxServerErrors": (
        [frontend_requests(9, 1), frontend_requests(9, 1, "overload")],
        [frontend_requests(99, 1), *(frontend_requests(1, 9, kind) for kind in ("validation", "cancelled"))],
    ),
    "TrtxGpuThrottled": (
        [throttled("thermal, by hardware", 1), throttled("power brake", 1)],
        [throttled("thermal, by hardware", 0), throttled("idle", 1), throttled("power limit", 1)],
    ),
    "TrtxGpuEccErrors": ([ecc("uncorrected", 1)], [ecc("uncorrected", 0), ecc("corrected", 1)]),
}


def test_an_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    """All cases are one test of promtool, each with a topology of its own, because a test takes half a second."""
    assert CASES.keys() == {alert.name for alert in ALERTS}
    numbered = [
        (alert, count, case)
        for alert, (raising, quiet) in CASES.items()
        for count, cases in ((1, raising), (0, quiet))
        for case in cases
    ]
    inputs = [
        {**one, "series": one["series"].replace('topology="t"', f'topology="case {place}"')}
        for place, (_, _, case) in enumerate(numbered)
        for one in case
    ]
    checks = [fires(alert, f"case {place}", count) for place, (alert, count, _) in enumerate(numbered)]
    checks += [fires(alert, "", 0) for alert in CASES]  # those of other jobs, whose series have no topology
    write_files([rule_file(has_gpus=True)], tmp_path / "rules")
    test = {"interval": "15s", "input_series": inputs, "promql_expr_test": checks}
    file = tmp_path / "rules" / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [FILE], "evaluation_interval": "15s", "tests": [test]}))
    done = run_promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def fires(alert: str, topology: str, count: int) -> dict[str, Any]:
    """promtool's check that so many of these alerts fire near the end of the cases."""
    time = "7m" if alert == "TrtxWorkerRestarted" else "9m"  # the restart, after 5 minutes, is forgotten at 10
    query = f'count(ALERTS{{alertname="{alert}", alertstate="firing", topology="{topology}"}}) or vector(0)'
    return {"expr": query, "eval_time": time, "exp_samples": [{"labels": "{}", "value": count}]}


def test_promtool_takes_the_files_of_a_plan(tmp_path: Path) -> None:
    plan = prepare(TopologySpec(engine="paced", mode="disagg", port=0), run_dir=tmp_path / "run")
    HOLDER.release((plan.port, *plan.internal_ports))
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    write_files(prometheus_files([tmp_path / "plan.json"], None, 5).files, tmp_path / "out")
    done = run_promtool("check", "config", tmp_path / "out" / "prometheus.yml")
    assert done.returncode == 0 and "FAILED" not in done.stdout, done.stdout + done.stderr


def test_pods_are_found_by_label_and_scraped_at_the_port_of_their_role(tmp_path: Path) -> None:
    """Debian's Prometheus has no discovery of pods, so the pods of this test are static."""
    document = yaml.safe_load(prometheus_files((), KubernetesPods("demo", "default"), 5).files[0].text)
    (job,) = document["scrape_configs"]
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod", "namespaces": {"names": ["default"]}}]
    pods = [("demo", "frontend"), ("demo", "decode"), ("demo", "prefill"), ("demo", "bench"), ("demo-2", "agg")]
    job["static_configs"] = [
        {
            "targets": [f"10.0.0.{number}"],
            "labels": {
                "__meta_kubernetes_pod_label_trtx_topology": topology,
                "__meta_kubernetes_pod_label_trtx_role": role,
                "__meta_kubernetes_pod_ip": f"10.0.0.{number}",
                "__meta_kubernetes_pod_name": f"pod-{number}",
            },
        }
        for number, (topology, role) in enumerate(pods)
    ]
    del document["rule_files"]
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump(document))
    done = run_promtool("check", "service-discovery", "--timeout=1s", file, job["job_name"])
    found = [one["labels"] for one in json.loads(done.stdout) if one.get("labels")]
    kept = {one["__address__"]: (one["topology"], one["role"], one["name"]) for one in found if "__address__" in one}
    assert kept == {
        "10.0.0.0:8000": ("demo", "frontend", "pod-0"),
        "10.0.0.1:9090": ("demo", "decode", "pod-1"),
        "10.0.0.2:9090": ("demo", "prefill", "pod-2"),
    }


def ask_on(url: str, model: str, stop: threading.Event) -> None:
    """Sends requests until ``stop``; those that a dead worker ends are no matter here."""
    body = {"model": model, "prompt": "the quick brown fox " * 8, "max_tokens": 24, "temperature": 0}
    number = 0
    while not stop.is_set():
        number += 1
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            post(url, "/v1/completions", {**body, "prompt": f"{number % 5} {body['prompt']}"})


@contextlib.contextmanager
def load(plan: Plan, clients: int) -> Iterator[None]:
    stop = threading.Event()
    threads = [threading.Thread(target=ask_on, args=(plan.url, plan.model, stop)) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.proof
def test_prometheus_sees_a_topology_under_load_a_killed_worker_and_its_end(tmp_path: Path) -> None:
    with trtx_serve("--engine", "torch", "--model", "synthetic:tiny-trained", "--mode", "disagg") as serve:
        plan = serve.wait_ready(120)
        exported = tmp_path / "exported"
        for verb, more in (("prometheus", ["--interval", "1"]), ("grafana", [])):
            done = call("export", verb, str(plan.run_dir), "-o", str(exported / verb), *more)
            assert done.code == 0, done.err
        with running_prometheus(exported / "prometheus", tmp_path / "data") as prometheus:
            names = {process.name for process in plan.processes}
            with load(plan, clients=4):
                until("every target is up", lambda: prometheus.health() == dict.fromkeys(names, "up"), seconds=60)
                until("tokens are counted", lambda: bool(prometheus.query("trtx:output_tokens:rate1m > 0")), seconds=60)
                until(
                    "the handoff is counted",
                    lambda: bool(prometheus.query("sum(rate(trtx_pair_handoff_bytes_total[1m])) > 0")),
                    seconds=60,
                )
                until(
                    "latency is known",
                    lambda: bool(prometheus.query("trtx:time_to_first_token_seconds:p99 > 0")),
                    seconds=60,
                )
                check_panels(prometheus, exported / "grafana" / "trtx-dashboard.json")
                os.kill(serve.pid_of("decode-0"), signal.SIGKILL)
                until("the worker is down", lambda: prometheus.health()["decode-0"] == "down", seconds=30)
                until("it is up again", lambda: prometheus.health()["decode-0"] == "up", seconds=120)
                until(
                    "the restart raises its alert",
                    lambda: prometheus.alerts().get(("TrtxWorkerRestarted", "decode-0")) == "firing",
                    seconds=30,
                )
                assert ("TrtxWorkerRestarted", "prefill-0") not in prometheus.alerts()
            health = {
                rule["name"]: rule["health"] for group in prometheus.api("rules")["groups"] for rule in group["rules"]
            }
            assert set(health.values()) == {"ok"}, health
            serve.process.send_signal(signal.SIGINT)
            down = {("TrtxWorkerDown", "prefill-0"), ("TrtxWorkerDown", "decode-0"), ("TrtxFrontendDown", "frontend")}
            until(
                "each process raises its alert",
                lambda: {one for one, state in prometheus.alerts().items() if state == "firing"} >= down,
                seconds=90,
            )


# Panels without a series in this topology: no images, grammars or drafts, and no preemption for want of blocks.
_EMPTY = {
    "Acceptance length",
    "Acceptance rate by position in the draft",
    "Draft share of the step time",
    "CUDA graph misses",
    "Images encoded",
    "Images that wait or are in work",
    "Embedding cache",
}


def check_panels(prometheus: Prometheus, file: Path) -> None:
    """Waits until each panel has a series but for _EMPTY; a query that Prometheus refuses is an error at once."""
    panels = [panel for panel in json.loads(file.read_text())["panels"] if panel.get("targets")]

    def empty() -> set[str]:
        found = set()
        for panel in panels:
            series = [prometheus.query(filled(target["expr"])) for target in panel["targets"]]
            found |= set() if series[0] else {panel["title"]}
        return found

    until("each panel has its series", lambda: empty() == _EMPTY, seconds=60, every=0.5)


def filled(query: str) -> str:
    """The query as Grafana sends it."""
    for variable, value in (("$__rate_interval", "1m"), ("$topology", ".*"), ("$model", ".*")):
        query = query.replace(variable, value)
    assert "$" not in query
    return query
