"""The rows and panels of the dashboard: what is shown, by which query, in which unit."""

from __future__ import annotations

from dataclasses import dataclass

_WHERE = 'topology=~"$topology"'
_MODEL = f'{_WHERE}, model=~"$model"'
_RATE = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """A query, and the legend of its series."""

    query: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A time series. ``unit``: an id of Grafana's units."""

    title: str
    unit: str
    queries: tuple[PanelQuery, ...]
    description: str = ""


@dataclass(frozen=True, slots=True)
class PanelRow:
    """A row of panels, three beside each other. ``of_gpus``: it is replaced by a text where there are none."""

    title: str
    panels: tuple[Panel, ...]
    of_gpus: bool = False


def _panel(title: str, unit: str, *queries: tuple[str, str], description: str = "") -> Panel:
    return Panel(title, unit, tuple(PanelQuery(query, legend) for query, legend in queries), description)


def _mean(total: str, count: str, by: str, where: str = _WHERE) -> str:
    """The mean of a histogram, or of a pair of counters, over the rate interval."""
    return f"sum by ({by}) (rate({total}{{{where}}}{_RATE})) / sum by ({by}) (rate({count}{{{where}}}{_RATE}))"


def _histogram_mean(family: str, by: str) -> str:
    return _mean(f"{family}_sum", f"{family}_count", by, _WHERE)


def _rate(counter: str, by: str, where: str = _WHERE) -> str:
    return f"sum by ({by}) (rate({counter}{{{where}}}{_RATE}))"


def _latency(title: str, family: str) -> Panel:
    def quantile(share: float) -> str:
        buckets = f"rate({family}_bucket{{{_MODEL}}}{_RATE})"
        return f"histogram_quantile({share}, sum by (topology, model, le) ({buckets}))"

    queries = ((quantile(share), f"{{{{model}}}} p{share * 100:g}") for share in (0.5, 0.95, 0.99))
    return _panel(title, "s", *queries)


_TRAFFIC = PanelRow(
    "Traffic",
    (
        _panel(
            "Requests by status",
            "reqps",
            (_rate("dynamo_frontend_requests_total", "model, status, error_type", _MODEL),
             "{{model}} {{status}} {{error_type}}"),
        ),
        _panel(
            "Tokens",
            "short",
            (_rate("dynamo_frontend_output_tokens_total", "model", _MODEL), "{{model}} output tokens/s"),
            (_rate("dynamo_frontend_input_sequence_tokens_sum", "model", _MODEL), "{{model}} prompt tokens/s"),
        ),
        _panel(
            "Open requests",
            "short",
            (f"sum by (model) (dynamo_frontend_inflight_requests{{{_MODEL}}})", "{{model}} in the frontends"),
            (f"sum by (model) (dynamo_frontend_queued_requests{{{_MODEL}}})", "{{model}} before their first token"),
        ),
    ),
)  # fmt: skip

_LATENCY = PanelRow(
    "Latency by stage",
    (
        _latency("Time to first token", "dynamo_frontend_time_to_first_token_seconds"),
        _latency("Inter-token latency", "dynamo_frontend_inter_token_latency_seconds"),
        _latency("Request duration", "dynamo_frontend_request_duration_seconds"),
        _panel(
            "Frontend, mean by stage",
            "s",
            (_histogram_mean("dynamo_frontend_stage_duration_seconds", "stage"), "{{stage}}"),
        ),
        _panel(
            "Engine queue, mean",
            "s",
            (_mean("trtx_admitted_queue_seconds_total", "trtx_admitted_requests_total", "name"), "{{name}}"),
        ),
        _panel(
            "Step time, mean, and the wait for the GPU in it",
            "s",
            (_histogram_mean("trtx_step_seconds", "name"), "{{name}} step"),
            (_mean("trtx_step_device_wait_seconds_total", "trtx_step_seconds_count", "name"), "{{name}} GPU wait"),
            description="A wait near 0 while steps run back to back: the GPU waits for the host. Known on a GPU only.",
        ),
    ),
)

_KV = PanelRow(
    "KV cache",
    (
        _panel(
            "Use of the pool",
            "percentunit",
            (
                f"sum by (name, tier) (trtx_kv_blocks_used{{{_WHERE}}}) / "
                f"sum by (name, tier) (trtx_kv_blocks{{{_WHERE}}})",
                "{{name}} {{tier}}",
            ),
        ),
        _panel(
            "Hit rate of the prefix cache",
            "percentunit",
            (
                _rate("trtx_kv_block_lookups_total", "name, tier", f'{_WHERE}, outcome="hit"')
                + " / "
                + _rate("trtx_kv_block_lookups_total", "name, tier"),
                "{{name}} {{tier}}",
            ),
        ),
        _panel("Preemptions", "ops", (_rate("trtx_preemptions_total", "name"), "{{name}}")),
    ),
)

_GPUS = PanelRow(
    "GPUs",
    (
        _panel(
            "Utilization",
            "percentunit",
            (f"max by (uuid, gpu) (trtx_gpu_utilization_ratio{{{_WHERE}}})", "GPU {{gpu}}"),
        ),
        _panel(
            "Clocks",
            "hertz",
            (f"max by (uuid, gpu) (trtx_gpu_sm_clock_hertz{{{_WHERE}}})", "GPU {{gpu}} SM"),
            (f"max by (uuid, gpu) (trtx_gpu_max_sm_clock_hertz{{{_WHERE}}})", "GPU {{gpu}} SM, highest"),
            (f"max by (uuid, gpu) (trtx_gpu_memory_clock_hertz{{{_WHERE}}})", "GPU {{gpu}} memory"),
        ),
        _panel("Power", "watt", (f"max by (uuid, gpu) (trtx_gpu_power_watts{{{_WHERE}}})", "GPU {{gpu}}")),
        _panel(
            "Memory",
            "bytes",
            (f"max by (uuid, gpu) (trtx_gpu_memory_used_bytes{{{_WHERE}}})", "GPU {{gpu}} used"),
            (f"max by (uuid, gpu) (trtx_gpu_memory_total_bytes{{{_WHERE}}})", "GPU {{gpu}} total"),
        ),
        _panel(
            "Temperature", "celsius", (f"max by (uuid, gpu) (trtx_gpu_temperature_celsius{{{_WHERE}}})", "GPU {{gpu}}")
        ),
        _panel(
            "What holds the clocks down",
            "short",
            (f"max by (uuid, gpu, reason) (trtx_gpu_clock_reason{{{_WHERE}}}) == 1", "GPU {{gpu}} {{reason}}"),
        ),
        _panel(
            "NVLink",
            "Bps",
            (
                f"max by (uuid, gpu, direction) (rate(trtx_gpu_nvlink_bytes_total{{{_WHERE}}}{_RATE}))",
                "GPU {{gpu}} {{direction}}",
            ),
        ),
        _panel(
            "Memory errors (ECC)",
            "short",
            (f"max by (uuid, gpu, type) (trtx_gpu_ecc_errors_total{{{_WHERE}}})", "GPU {{gpu}} {{type}}"),
        ),
        _panel(
            "Energy per output token",
            "joule",
            (
                f"sum(max by (uuid) (rate(trtx_gpu_energy_joules_total{{{_WHERE}}}{_RATE}))) / "
                f"sum(rate(dynamo_frontend_output_tokens_total{{{_WHERE}}}{_RATE}))",
                "all GPUs",
            ),
        ),
    ),
    of_gpus=True,
)

_HANDOFF = PanelRow(
    "KV handoff",
    (
        _panel(
            "Requests by what became of their KV",
            "reqps",
            (_rate("trtx_pair_handoffs_total", "name, prefill, outcome"), "{{prefill}} → {{name}} {{outcome}}"),
            (_rate("trtx_local_prefills_total", "name"), "{{name}} local"),
        ),
        _panel(
            "Bytes",
            "Bps",
            (_rate("trtx_pair_handoff_bytes_total", "name, prefill"), "{{prefill}} → {{name}}"),
        ),
        _panel(
            "Time of a read, mean",
            "s",
            (_mean("trtx_handoff_seconds_total", "trtx_handoff_reads_total", "name"), "{{name}}"),
        ),
        _panel(
            "Failures",
            "ops",
            (_rate("trtx_handoff_failed_reads_total", "name"), "{{name}} failed reads"),
            (_rate("trtx_recomputed_prefixes_total", "name"), "{{name}} recomputed prompts"),
            (_rate("trtx_expired_leases_total", "name"), "{{name}} expired leases"),
        ),
        _panel("Leases", "short", (f"sum by (name) (trtx_leases{{{_WHERE}}})", "{{name}}")),
    ),
)

_ACCEPTED = "trtx_accepted_draft_tokens_total"
_SPECULATION = PanelRow(
    "Speculation",
    (
        _panel(
            "Acceptance length",
            "short",
            (f"1 + {_mean(_ACCEPTED, 'trtx_drafts_total', 'name')}", "{{name}}"),
            description="Tokens of a request in a step that verified its draft: 1 plus accepted tokens over drafts.",
        ),
        _panel(
            "Acceptance rate by position in the draft",
            "percentunit",
            (_mean(_ACCEPTED, "trtx_draft_tokens_total", "name, position"), "{{name}} token {{position}}"),
        ),
        _panel(
            "Draft share of the step time",
            "percentunit",
            (_mean("trtx_drafting_seconds_total", "trtx_step_seconds_sum", "name"), "{{name}}"),
        ),
    ),
)

_DECODES = _rate("trtx_step_decodes_total", "name")
_DECODED = f"{_DECODES} + ({_rate(_ACCEPTED, 'name')} or {_DECODES} * 0)"
_WORKERS = PanelRow(
    "Workers",
    (
        _panel("Up", "short", (f"min by (name) (up{{{_WHERE}}})", "{{name}}")),
        _panel(
            "Requests in the engine",
            "short",
            (f"sum by (name) (trtx_running_requests{{{_WHERE}}})", "{{name}} running"),
            (f"sum by (name) (trtx_queued_requests{{{_WHERE}}})", "{{name}} queued"),
            (f"sum by (name) (trtx_paused_requests{{{_WHERE}}})", "{{name}} preempted"),
        ),
        _panel(
            "Tokens that steps computed",
            "short",
            (_rate("trtx_step_prompt_tokens_total", "name"), "{{name}} prompt tokens/s"),
            (_DECODED, "{{name}} decode tokens/s"),
        ),
        _panel("Requests by outcome", "reqps", (_rate("trtx_requests_total", "name, outcome"), "{{name}} {{outcome}}")),
        _panel(
            "Memory of the processes",
            "bytes",
            (f"sum by (name, process) (process_resident_memory_bytes{{{_WHERE}}})", "{{name}} {{process}}"),
        ),
        _panel(
            "CPU cores in use", "short", (_rate("process_cpu_seconds_total", "name, process"), "{{name}} {{process}}")
        ),
        _panel(
            "Open file descriptors",
            "short",
            (f"sum by (name, process) (process_open_fds{{{_WHERE}}})", "{{name}} {{process}}"),
        ),
        _panel("CUDA graph misses", "ops", (_rate("trtx_graph_misses_total", "name"), "{{name}}")),
        _panel("Grammars", "ops", (_rate("trtx_grammar_lookups_total", "name, outcome"), "{{name}} {{outcome}}")),
        _panel(
            "Images encoded",
            "ops",
            (_rate("trtx_media_pictures_total", "name, stage", f'{_WHERE}, stage="encode"'), "{{name}}"),
        ),
        _panel(
            "Images that wait or are in work",
            "short",
            (f"sum by (name, stage) (trtx_media_open_calls{{{_WHERE}}})", "{{name}} {{stage}}"),
        ),
        _panel(
            "Embedding cache",
            "ops",
            (_rate("trtx_embedding_cache_lookups_total", "name, outcome"), "{{name}} {{outcome}}"),
        ),
    ),
)

ROWS = (_TRAFFIC, _LATENCY, _KV, _GPUS, _HANDOFF, _SPECULATION, _WORKERS)
