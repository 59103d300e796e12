"""The addresses of a topology's metrics, and Prometheus' configuration with them.

Checked with promtool of Prometheus 2.42.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from trtx.config.wording import quoted
from trtx.errors import UsageError
from trtx.export.files import ExportedFile
from trtx.export.kubernetes.pods import ROLE_LABEL, TOPOLOGY_LABEL
from trtx.export.kubernetes.variables import HTTP_PORT, SYSTEM_PORT
from trtx.export.monitoring.rules import FILE as RULES_FILE
from trtx.topology import Plan

FILE = "prometheus.yml"
JOB = "trtx"
_PLAN = "plan.json"
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_META = "__meta_kubernetes_pod"
_Yaml = dict[str, Any]
_HEAD = f"# Written by trtx export prometheus. Start it with: prometheus --config.file={FILE}\n"


@dataclass(frozen=True, slots=True)
class KubernetesPods:
    """The pods of ``trtx export kubernetes`` with this ``--name`` and ``--namespace``. Raises UsageError."""

    name: str
    namespace: str

    def __post_init__(self) -> None:
        for option, value in (("--kubernetes", self.name), ("--namespace", self.namespace)):
            if not _LABEL.fullmatch(value):
                raise UsageError(
                    f"{option} {quoted(value)} is refused; expected lower-case letters, digits and hyphens, as "
                    "Kubernetes has in names"
                )


def read_plan(path: Path) -> Plan:
    """Reads the plan of ``trtx serve`` from its run directory or from ``plan.json``. Raises UsageError."""
    file = path / _PLAN if path.is_dir() else path
    where = quoted(str(path))
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        there = "has no plan.json" if path.is_dir() else "does not exist"
        raise UsageError(f"{where} {there}; expected a run directory of trtx serve, or its plan.json") from None
    except OSError as error:
        raise UsageError(
            f"{where} can't be read ({error.strerror or error}); expected plan.json of trtx serve"
        ) from error
    except ValueError as error:
        raise UsageError(f"{where} is not JSON; expected a run directory of trtx serve, or its plan.json") from error
    if isinstance(document, dict) and "topologies" in document:
        raise UsageError(
            f"{where} is a run of trtx bench, whose topologies end with it; expected a run directory of trtx serve"
        )
    try:
        return Plan.from_json(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{where} is not a plan of trtx serve that this trtx reads; expected its run directory or plan.json"
        ) from error


def configuration(sources: Sequence[Plan | KubernetesPods], interval_s: int) -> ExportedFile:
    """Prometheus' configuration, which scrapes these topologies every ``interval_s`` seconds and loads the rules."""
    document = {
        "global": {"scrape_interval": f"{interval_s}s", "evaluation_interval": f"{interval_s}s"},
        "rule_files": [RULES_FILE],
        "scrape_configs": [job for source in sources for job in _jobs(source)],
    }
    return ExportedFile(FILE, _HEAD + yaml.safe_dump(document, sort_keys=False))


def _jobs(source: Plan | KubernetesPods) -> Iterator[_Yaml]:
    if isinstance(source, KubernetesPods):
        yield _pods_job(source)
        return
    topology = source.namespace
    frontends = [
        (urlsplit(source.url_of(frontend)).netloc, {"role": "frontend", "name": frontend.name})
        for frontend in source.frontends
    ]
    # Several jobs of a name are refused, and dashboards tell processes apart by their labels.
    job: _Yaml = {"job_name": f"{JOB}-{topology}-frontends"}
    if source.tls is not None:
        job |= {"scheme": "https", "tls_config": {"ca_file": str(source.tls.certificate)}}
    yield job | _static(topology, frontends)
    workers = [
        (f"{worker.address}:{worker.system_port}", {"role": worker.role, "name": worker.name})
        for worker in source.workers
        if worker.system_port is not None
    ]
    if workers:
        yield {"job_name": f"{JOB}-{topology}-workers"} | _static(topology, workers)


def _static(topology: str, targets: Sequence[tuple[str, Mapping[str, str]]]) -> _Yaml:
    return {
        "static_configs": [
            {"targets": [address], "labels": {"topology": topology, **labels}} for address, labels in targets
        ]
    }


def _pods_job(pods: KubernetesPods) -> _Yaml:
    def label(name: str) -> str:
        return f"{_META}_label_{name.replace('-', '_')}"

    def port(role: str, number: int) -> _Yaml:
        return {
            "source_labels": [label(ROLE_LABEL), f"{_META}_ip"],
            "regex": f"{role};(.+)",
            "target_label": "__address__",
            "replacement": f"$1:{number}",
        }

    return {
        "job_name": f"{JOB}-{pods.name}",
        "kubernetes_sd_configs": [{"role": "pod", "namespaces": {"names": [pods.namespace]}}],
        "relabel_configs": [
            {"source_labels": [label(TOPOLOGY_LABEL)], "regex": pods.name, "action": "keep"},
            {"source_labels": [label(ROLE_LABEL)], "regex": "bench", "action": "drop"},
            port("frontend", HTTP_PORT),
            port("(?:agg|prefill|decode)", SYSTEM_PORT),
            {"source_labels": [label(TOPOLOGY_LABEL)], "target_label": "topology"},
            {"source_labels": [label(ROLE_LABEL)], "target_label": "role"},
            {"source_labels": [f"{_META}_name"], "target_label": "name"},
        ],
    }
