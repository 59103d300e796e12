"""Recording and alert rules for a served topology, as one rule file of Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import yaml

from trtx.export.files import ExportedFile

FILE = "trtx-rules.yml"
_QUANTILES = (0.5, 0.95, 0.99)
_PROCESS = "topology, role, name"
_GPU = f"{_PROCESS}, gpu, uuid"
_SLOWING = "hardware slowdown|thermal, by software|thermal, by hardware|power brake"
_CLIENTS = "|validation|not_found|cancelled"
"""Types of errors that a client causes, and the type of a success."""


@dataclass(frozen=True, slots=True)
class RecordingRule:
    """A query whose result Prometheus keeps under a name of its own."""

    name: str
    query: str


@dataclass(frozen=True, slots=True)
class AlertRule:
    """An alert. ``for_s``: seconds for which the query must have a result. ``summary``: may name the alert's labels."""

    name: str
    query: str
    for_s: int
    severity: Literal["warning", "critical"]
    summary: str
    needs_gpu: bool = False


def _quantiles(name: str, family: str) -> tuple[RecordingRule, ...]:
    return tuple(
        RecordingRule(
            f"trtx:{name}:p{quantile * 100:g}",
            f"histogram_quantile({quantile}, sum by (topology, model, le) (rate({family}_bucket[1m])))",
        )
        for quantile in _QUANTILES
    )


RECORDING: tuple[RecordingRule, ...] = (
    *_quantiles("time_to_first_token_seconds", "dynamo_frontend_time_to_first_token_seconds"),
    *_quantiles("inter_token_latency_seconds", "dynamo_frontend_inter_token_latency_seconds"),
    RecordingRule(
        "trtx:output_tokens:rate1m", "sum by (topology, model) (rate(dynamo_frontend_output_tokens_total[1m]))"
    ),
    RecordingRule(
        "trtx:prompt_tokens:rate1m", "sum by (topology, model) (rate(dynamo_frontend_input_sequence_tokens_sum[1m]))"
    ),
    RecordingRule("trtx:requests:rate1m", "sum by (topology, model) (rate(dynamo_frontend_requests_total[1m]))"),
    RecordingRule(
        "trtx:server_errors:ratio1m",
        f'sum by (topology) (rate(dynamo_frontend_requests_total{{status="error", error_type!~"{_CLIENTS}"}}[1m]))'
        " / sum by (topology) (rate(dynamo_frontend_requests_total[1m]))",
    ),
    RecordingRule(
        "trtx:kv_use:ratio",
        f"sum by ({_PROCESS}, tier) (trtx_kv_blocks_used) / sum by ({_PROCESS}, tier) (trtx_kv_blocks)",
    ),
    RecordingRule(
        "trtx:kv_hits:ratio5m",
        f'sum by ({_PROCESS}, tier) (rate(trtx_kv_block_lookups_total{{outcome="hit"}}[5m]))'
        f" / sum by ({_PROCESS}, tier) (rate(trtx_kv_block_lookups_total[5m]))",
    ),
    RecordingRule(
        "trtx:acceptance_length:ratio5m",
        f"1 + sum by ({_PROCESS}) (rate(trtx_accepted_draft_tokens_total[5m]))"
        f" / sum by ({_PROCESS}) (rate(trtx_drafts_total[5m]))",
    ),
    RecordingRule(
        "trtx:handoff_failures:increase5m",
        f"sum by ({_PROCESS}) (increase(trtx_handoff_failed_reads_total[5m]))"
        f" + sum by ({_PROCESS}) (increase(trtx_recomputed_prefixes_total[5m]))"
        f" + sum by ({_PROCESS}) (increase(trtx_expired_leases_total[5m]))",
    ),
)

ALERTS: tuple[AlertRule, ...] = (
    AlertRule(
        "TrtxWorkerDown",
        'up{topology!="", role!="frontend"} == 0',
        15,
        "critical",
        "{{ $labels.role }} worker {{ $labels.name }} of {{ $labels.topology }} does not answer on its metrics port.",
    ),
    AlertRule(
        "TrtxFrontendDown",
        'up{topology!="", role="frontend"} == 0',
        15,
        "critical",
        "{{ $labels.name }} of {{ $labels.topology }} does not answer.",
    ),
    AlertRule(
        "TrtxWorkerRestarted",
        f'count by ({_PROCESS}) (count_over_time(process_start_time_seconds{{process="worker"}}[5m])) > 1',
        0,
        "warning",
        "{{ $labels.name }} of {{ $labels.topology }} was started again less than 5 minutes ago.",
    ),
    AlertRule(
        "TrtxQueueGrowing",
        f"sum by ({_PROCESS}) (deriv(trtx_queued_requests[2m])) > 0"
        f" and sum by ({_PROCESS}) (min_over_time(trtx_queued_requests[2m])) > 0",
        120,
        "warning",
        "The queue of {{ $labels.name }} of {{ $labels.topology }} has grown for 2 minutes and was never empty.",
    ),
    AlertRule(
        "TrtxKvFull",
        f"max by ({_PROCESS}) (trtx:kv_use:ratio) > 0.95 and sum by ({_PROCESS}) (trtx_queued_requests) > 0",
        60,
        "warning",
        "The KV pool of {{ $labels.name }} of {{ $labels.topology }} is {{ $value | humanizePercentage }} full, and "
        "requests wait.",
    ),
    AlertRule(
        "TrtxHandoffFailures",
        "trtx:handoff_failures:increase5m > 0",
        0,
        "warning",
        "KV handoffs of {{ $labels.name }} of {{ $labels.topology }} failed: {{ $value | humanize }} in 5 minutes.",
    ),
    AlertRule(
        "TrtxServerErrors",
        "trtx:server_errors:ratio1m > 0.05",
        60,
        "critical",
        "The frontends of {{ $labels.topology }} answer {{ $value | humanizePercentage }} of requests with a server "
        "error.",
    ),
    AlertRule(
        "TrtxGpuThrottled",
        f'max by ({_GPU}, reason) (trtx_gpu_clock_reason{{reason=~"{_SLOWING}"}}) == 1',
        60,
        "warning",
        "GPU {{ $labels.gpu }} of {{ $labels.name }} of {{ $labels.topology }} is slowed: {{ $labels.reason }}.",
        needs_gpu=True,
    ),
    AlertRule(
        "TrtxGpuEccErrors",
        f'sum by ({_GPU}) (increase(trtx_gpu_ecc_errors_total{{type="uncorrected"}}[10m])) > 0',
        0,
        "critical",
        "GPU {{ $labels.gpu }} of {{ $labels.name }} of {{ $labels.topology }} has new uncorrected memory errors.",
        needs_gpu=True,
    ),
)


def rule_file(*, has_gpus: bool) -> ExportedFile:
    """The rule file; without GPUs, it has no alerts about them."""
    alerts = [_alert(alert) for alert in ALERTS if has_gpus or not alert.needs_gpu]
    recording = [{"record": rule.name, "expr": rule.query} for rule in RECORDING]
    groups = [{"name": "trtx-recording", "rules": recording}, {"name": "trtx-alerts", "rules": alerts}]
    text = yaml.safe_dump({"groups": groups}, sort_keys=False, width=10**6)
    return ExportedFile(
        FILE, f"# Written by trtx export prometheus. Check it with: promtool check rules {FILE}\n{text}"
    )


def _alert(alert: AlertRule) -> dict[str, Any]:
    held = {"for": f"{alert.for_s}s"} if alert.for_s else {}
    labels = {"severity": alert.severity}
    return {
        "alert": alert.name,
        "expr": alert.query,
        **held,
        "labels": labels,
        "annotations": {"summary": alert.summary},
    }
