"""Command line and environment of each process.

On one machine, Dynamo runs without etcd and NATS, on loopback only, isolated from other topologies. Over hosts, its
processes find each other in etcd, send events through NATS, and listen on their host's address only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtx.config import Role, TopologySpec
from trtx.config.conditional_disagg import router_settings
from trtx.config.media import MediaLimits
from trtx.config.otlp import signal_url
from trtx.topology.plan import TOPOLOGY_VARIABLE, EtcdService, NatsService
from trtx.topology.weight_groups import group_flags

_STREAM_TIMEOUT_S = 300  # silence after which the frontend cuts off a stream; a long prompt on a CPU takes less
KV_ROUTER_FLAGS = ("--router-prefill-load-scale", "4", "--router-predicted-ttl-secs", "5")
"""Router flags for the KV mode, with the effects measured in docs/performance.md, "KV-aware routing".

With the default scale of 1 (Dynamo 1.4.2, 1.6.1), a block to compute counts as much as a block that a running request
holds, so one running request outweighs a cached prefix of its length. Without prediction, the router does not know a
prefix while its first request is still computing it.
"""
_OF_THE_TOPOLOGY = "which trtx sets itself to isolate topologies from each other"
_NO_HTTP = "with which the frontend would serve no HTTP"
_EXITS = "with which the frontend exits at once"
CONDITIONAL_DISAGG = "--router-conditional-disagg"
"""Flag of dynamo.frontend with which its router may send a prompt to a decode worker alone."""
_OF_CONDITIONAL = "which trtx sets itself, from --conditional-disagg"
OWNED_FRONTEND_FLAGS = {
    "--http-host": "which trtx sets itself, from --host",
    "--http-port": "which trtx sets itself, from --port",
    "--router-mode": "which trtx sets itself, from --router-mode",
    CONDITIONAL_DISAGG: _OF_CONDITIONAL,
    f"--no-{CONDITIONAL_DISAGG.removeprefix('--')}": _OF_CONDITIONAL,
    f"{CONDITIONAL_DISAGG}-config": _OF_CONDITIONAL,
    "--model-name": "which trtx sets itself, from --served-model-name",
    "--model-path": "which trtx sets itself, from --model",
    "--namespace": _OF_THE_TOPOLOGY,
    "--namespace-prefix": _OF_THE_TOPOLOGY,
    "--discovery-backend": _OF_THE_TOPOLOGY,
    "--request-plane": _OF_THE_TOPOLOGY,
    "--event-plane": _OF_THE_TOPOLOGY,
    "--broker-xsub": _OF_THE_TOPOLOGY,
    "--broker-xpub": _OF_THE_TOPOLOGY,
    "--sleeps-in": "which trtx sets itself, from sleep_config",
    "--prompts-of": "which trtx sets itself, from --model",
    "--prompts-template": "which trtx sets itself, from --chat-template",
    "--parser-of-calls": "which trtx sets itself, from --tool-call-parser",
    "--max-queued-requests": "which trtx sets itself, from --max-queued-requests",
    "--max-queue-s": "which trtx sets itself, from --max-queue-s",
    "--max-request-s": "which trtx sets itself, from --max-request-s",
    "--frontends": "which trtx sets itself, from --frontends",
    "--tls-cert-path": "which trtx sets itself, from --tls-cert",
    "--tls-key-path": "which trtx sets itself, from --tls-key",
    "--kserve-grpc-server": _NO_HTTP,
    "--interactive": _NO_HTTP,
    "-i": _NO_HTTP,
    "--version": _EXITS,
    "--help": _EXITS,
    "-h": _EXITS,
}
"""Flags of dynamo.frontend 1.6.1 that ``--router-args`` may not contain, and why: a later flag overrides trtx's own."""
_MIGRATION_LIMIT = 3
_OTLP_PROTOCOL = "http/protobuf"
_LOOPBACK = "127.0.0.1"
LOOPBACK_DEVICE = "lo"
_MIB = 1 << 20
LEAST_BODY_MIB = 45
"""Smallest limit of an HTTP request body; larger bodies get a 413.

It equals Dynamo 1.6.1's default, and is set explicitly because other limits are derived from it. A large body delays
concurrent streams in proportion to its size (docs/performance.md, "A text stream beside hostile media").
"""
MOST_BODY_MIB = 256
"""Largest limit of a body, whatever ``max_media_bytes`` is.

The frontend buffers each body, and the message's length has 32 bits.
"""
_BODY_MARGIN_MIB = 2  # for the text of a request with an image
# an inline image appears twice in a message, and decode's message also contains prefill's answer; includes a margin
_MESSAGE_FOR_BODY = 6
LEAST_MESSAGE_BYTES = 256 * _MIB
_ACKNOWLEDGED_S = _STREAM_TIMEOUT_S
"""How long a frontend waits, on one machine, for a worker to acknowledge that it has received a whole request.

With large bodies on busy cores that takes longer than Dynamo 1.6.1's default of 5 s. A worker that exceeds the timeout
is out of the routing for seconds, which means a 503 for every request if it is the only one. A worker that ends closes
its connections; a stopped worker loses its discovery records after 10 s and is then killed by the launcher, so its
requests do not wait longer than that.
"""
# A worker that sent nothing for this long gets a canary request of one token; answers to clients count as traffic.
_CANARY_WAIT_S = 5
# Dynamo's default is 3, but an engine in the middle of a long prompt is busy, not dead.
_CANARY_TIMEOUT_S = 30


@dataclass(frozen=True, slots=True)
class BrokerPorts:
    """An event broker on one machine: the ports to which publishers and subscribers connect."""

    xsub: int
    xpub: int


def body_mib(media: MediaLimits) -> int:
    """Limit of an HTTP request body in MiB: within bounds, enough for ``max_media_bytes`` as a base64 ``data:`` URL."""
    base64_bytes = (media.max_media_bytes + 2) // 3 * 4
    return min(MOST_BODY_MIB, max(LEAST_BODY_MIB, -(-base64_bytes // _MIB) + _BODY_MARGIN_MIB))


def largest_inline_bytes(media: MediaLimits) -> int:
    """Size of the largest file that fits into a request as its only ``data:`` URL."""
    return min(media.max_media_bytes, (body_mib(media) - _BODY_MARGIN_MIB) * _MIB // 4 * 3)


def message_bytes(media: MediaLimits) -> int:
    """Limit of one message between frontend and worker.

    Dynamo 1.6.1 answers a message above the limit with a 400 without a reason, so the limit on bodies is much smaller
    and takes effect first.
    """
    return max(LEAST_MESSAGE_BYTES, _MESSAGE_FOR_BODY * body_mib(media) * _MIB)


def shared_environment(namespace: str, group: str, scratch_dir: Path, spec: TopologySpec) -> dict[str, str]:
    """Environment of every process of a topology on one machine, frontends and workers.

    ``group``: see :func:`trtx.topology.plan.group_of`. ``TMPDIR`` is set because every Dynamo process writes a logging
    configuration file into the temporary directory.
    """
    of_format = {} if spec.log_format is None else {"DYN_LOGGING_JSONL": "1" if spec.log_format == "json" else "0"}
    return {
        TOPOLOGY_VARIABLE: group,
        "DYN_NAMESPACE": namespace,
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_LOG": spec.log_level or "warn",
        **of_format,
        "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(scratch_dir),
        "DYN_TCP_MAX_MESSAGE_SIZE": str(message_bytes(spec.media)),
    }


def local_environment(scratch_dir: Path, brokers: Sequence[BrokerPorts]) -> dict[str, str]:
    """Environment through which the processes of one machine find each other and exchange events.

    ``DYN_ZMQ_BROKER_URL`` keeps the event plane, which carries prompt token ids, from binding every interface. Each
    frontend runs a broker, every process connects to all brokers, and duplicate events count once. So the end of one
    frontend does not stop the events of the others.
    """
    xsub = ";".join(f"tcp://{_LOOPBACK}:{broker.xsub}" for broker in brokers)
    xpub = ";".join(f"tcp://{_LOOPBACK}:{broker.xpub}" for broker in brokers)
    return {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(scratch_dir / "kv"),
        "DYN_EVENT_PLANE": "zmq",
        "DYN_TCP_RPC_HOST": _LOOPBACK,
        "DYN_TCP_RESPONSE_STREAM_HOST": _LOOPBACK,
        "DYN_TCP_REQUEST_TIMEOUT": str(_ACKNOWLEDGED_S),
        "DYN_ZMQ_BROKER_URL": f"xsub={xsub} , xpub={xpub}",
    }


def remote_environment(etcd: EtcdService, nats: NatsService, address: str, request_port: int) -> dict[str, str]:
    """The same for one process of a topology over hosts. Secrets are added when the process starts.

    ``request_port``: the port on which a worker receives requests, and a frontend those of other frontends' KV routers.
    """
    return {
        "DYN_DISCOVERY_BACKEND": "etcd",
        "ETCD_ENDPOINTS": ",".join(etcd.endpoints),
        "ETCD_LEASE_TTL": str(etcd.lease_ttl_s),
        "DYN_EVENT_PLANE": "nats",
        "NATS_SERVER": nats.url,
        "DYN_TCP_RPC_HOST": address,
        "DYN_TCP_RPC_PORT": str(request_port),
        "DYN_TCP_RESPONSE_STREAM_HOST": address,
    }


def frontend_environment(media: MediaLimits) -> dict[str, str]:
    """Environment of a frontend: no admin routes, and a timeout for streams of workers that went away."""
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "DYN_DISABLE_FRONTEND_ADMIN_API": "1",
        "DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS": str(_STREAM_TIMEOUT_S),
        "DYN_HTTP_BODY_LIMIT_MB": str(body_mib(media)),
        "DYN_MM_MAX_DATA_URL_MB": str(body_mib(media)),  # 16 by default; the limit on bodies is the narrower one
    }


def tracing_environment(endpoint: str | None, name: str, log: str) -> dict[str, str]:
    """Environment of a process that sends traces to the collector at ``endpoint``; empty without one.

    Dynamo 1.6.1 exports its spans and, under other variables, its logs. If the collector does not answer, its SDK logs
    an error every second; this is switched off, because the launcher and the workers warn once. Dynamo's module
    ``logging`` creates the span of a call to an encode worker at level info, so that level is switched on: without the
    span, the call would begin a trace of its own. ``log``: DYN_LOG of the process.
    """
    if endpoint is None:
        return {}
    return {
        "OTEL_EXPORT_ENABLED": "1",
        "OTEL_SERVICE_NAME": f"trtx-{name}",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": signal_url(endpoint, "traces"),
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": _OTLP_PROTOCOL,
        "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": signal_url(endpoint, "logs"),
        "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": _OTLP_PROTOCOL,
        "DYN_LOG": f"{log},request_span=warn,dynamo_runtime::logging=info,opentelemetry_sdk=off,opentelemetry_otlp=off",
    }


def response_environment(port: int) -> dict[str, str]:
    """Port on which a frontend over hosts receives the workers' answers."""
    return {"DYN_TCP_RESPONSE_STREAM_PORT": str(port)}


def worker_environment(
    gpus: tuple[str, ...],
    system_port: int,
    threads: int | None,
    *,
    address: str = _LOOPBACK,
    device: str = LOOPBACK_DEVICE,
    kv_ports: tuple[int, int] | None = None,
) -> dict[str, str]:
    """Environment of one worker: GPUs, metrics port, threads (None: the engine's default), no fixed delay on draining.

    ``gpus``: UUIDs, or indices if the worker runs on another machine. ``address``: of the system port, from which
    frontends of other hosts also fetch the model's files. ``device``: UCX's network device for KV; ``kv_ports``: the
    ports on which its TCP transport listens.

    The canary makes ``/health`` and ``/live`` of the system port truthful: without it, Dynamo 1.6.1 always answers 200.
    Nothing else depends on it.
    """
    environment = {
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "DYN_SYSTEM_HOST": address,
        "DYN_SYSTEM_PORT": str(system_port),
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
        "DYN_HEALTH_CHECK_ENABLED": "true",
        "DYN_CANARY_WAIT_TIME": str(_CANARY_WAIT_S),
        "DYN_HEALTH_CHECK_REQUEST_TIMEOUT": str(_CANARY_TIMEOUT_S),
        "UCX_NET_DEVICES": device,
    }
    if kv_ports is not None:
        environment["UCX_TCP_PORT_RANGE"] = "{}-{}".format(*kv_ports)
    return environment if threads is None else environment | thread_environment(threads)


def thread_environment(threads: int) -> dict[str, str]:
    """Environment of a worker that computes on the CPU."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def frontend_command(
    spec: TopologySpec,
    namespace: str,
    host: str,
    port: int,
    *,
    broker: BrokerPorts | None,
    frontends: int,
    prompts_of: Path | None = None,
    chat_template: Path | None = None,
    sleeps_in: Path | None = None,
) -> tuple[str, ...]:
    """Command line of a frontend, which is Dynamo's frontend started through trtx's.

    ``--namespace`` keeps it from listing other topologies' models. ``broker``: the event broker that it runs, on one
    machine. ``frontends``: their number. With several, its router exchanges the workers' load with the others, as it
    would only know its own requests, and each takes its share of the bounds. ``prompts_of``: the model for which the
    frontend renders prompts with transformers, if Dynamo's may differ. ``chat_template``: the file that replaces the
    model's. ``sleeps_in``: the run directory, if workers can sleep and have their status files on the same machine.
    """
    command = [sys.executable, "-m", "trtx.frontend", "--http-host", host, "--http-port", str(port)]
    if broker is not None:
        command += ["--broker-xsub", f"tcp://{_LOOPBACK}:{broker.xsub}"]
        command += ["--broker-xpub", f"tcp://{_LOOPBACK}:{broker.xpub}"]
    command += ["--namespace", namespace]
    if prompts_of is not None:
        command += ["--prompts-of", str(prompts_of)]
        if chat_template is not None:
            command += ["--prompts-template", str(chat_template)]
        if (parser := spec.registered_parsers.get("--tool-call-parser")) is not None:
            command += ["--parser-of-calls", parser]
    if sleeps_in is not None:
        command += ["--sleeps-in", str(sleeps_in)]
    if spec.tls_cert is not None:
        command += ["--tls-cert-path", str(spec.tls_cert), "--tls-key-path", str(spec.tls_key)]
    command += ["--router-mode", spec.router_mode, "--migration-limit", str(_MIGRATION_LIMIT)]
    if spec.router_mode == "kv":
        command += KV_ROUTER_FLAGS
        if frontends > 1:
            command.append("--router-replica-sync")
    return (*command, *conditional_flags(spec), *_bounds(spec, frontends), *spec.router_args)


def conditional_flags(spec: TopologySpec) -> list[str]:
    """Flags of dynamo.frontend for ``spec.conditional_disagg``; empty without a policy and in mode agg."""
    if spec.conditional_disagg is None or spec.mode == "agg":
        return []
    settings = json.dumps(dict(router_settings(spec.conditional_disagg)))
    return [CONDITIONAL_DISAGG, f"{CONDITIONAL_DISAGG}-config", settings]


def _bounds(spec: TopologySpec, frontends: int) -> list[str]:
    """Flags of trtx.frontend for the bounds on queues and requests; none without a bound."""
    given = {
        "--max-queued-requests": spec.max_queued_requests,
        "--max-queue-s": spec.max_queue_s,
        "--max-request-s": spec.max_request_s,
    }
    flags = [word for flag, value in given.items() if value is not None for word in (flag, str(value))]
    return [*flags, "--frontends", str(frontends)] if flags else []


def worker_command(
    spec: TopologySpec,
    role: Role,
    name: str,
    *,
    engine: str,
    model_path: Path,
    model: str,
    config: Path,
    status_file: Path,
    prompts_by_frontend: bool,
    chat_template: Path | None = None,
    weight_group: tuple[str, ...] = (),
) -> tuple[str, ...]:
    """Command line of a trtx worker, as in docs/contracts.md. ``engine``: resolved, never ``auto``."""
    command = [sys.executable, "-m", "trtx.worker", "--role", role, "--engine", engine]
    command += ["--model", str(model_path), "--served-model-name", model]
    command += ["--engine-config", str(config), "--name", name, "--status-file", str(status_file)]
    if spec.encoders and role != "encode":
        command += ["--encoders", "remote"]
    if spec.deterministic and role != "encode":
        command.append("--deterministic")
    command += group_flags(weight_group)
    if prompts_by_frontend:
        command += ["--prompts-by", "frontend"]
    if role != "encode":
        command += _chat_flags(spec, chat_template)
    if limits := spec.media.model_dump_json(exclude_defaults=True).removeprefix("{}"):
        command += ["--media", limits]
    return tuple(command)


def _chat_flags(spec: TopologySpec, chat_template: Path | None) -> list[str]:
    flags = [word for option, name in spec.registered_parsers.items() for word in (option, name)]
    return flags if chat_template is None else [*flags, "--chat-template", str(chat_template)]


def simulated_command(
    spec: TopologySpec,
    role: Role,
    namespace: str,
    *,
    model_path: Path,
    model: str,
    values: Mapping[str, Any],
    chat_template: Path | None = None,
) -> tuple[str, ...]:
    """Command line of Dynamo's mocker with TensorRT-LLM's scheduler; the engine config's limits become its flags.

    The mocker has no flags for parsers and templates, so ``trtx.worker.simulated`` starts it if there are any.
    """
    component = "prefill" if role == "prefill" else "backend"
    of_chat = _chat_flags(spec, chat_template)
    command = [sys.executable, "-m", "trtx.worker.simulated" if of_chat else "dynamo.mocker", *of_chat]
    command += ["--engine-type", "trtllm", "--disaggregation-mode", role]
    command += ["--model-path", str(model_path), "--model-name", model]
    command += ["--endpoint", f"dyn://{namespace}.{component}.generate"]
    kv_cache = values.get("kv_cache_config") or {}
    tokens_per_block = kv_cache.get("tokens_per_block")
    max_tokens = kv_cache.get("max_tokens")
    flags = {
        "--max-num-seqs": values.get("max_batch_size"),
        "--max-num-batched-tokens": values.get("max_num_tokens"),
        "--block-size": tokens_per_block,
        "--num-gpu-blocks-override": max_tokens // (tokens_per_block or 32) if max_tokens else None,
        "--speedup-ratio": values.get("speedup_ratio"),
    }
    for flag, value in flags.items():
        if value is not None:
            command += [flag, str(value)]
    if kv_cache.get("enable_block_reuse") is False:
        command.append("--no-enable-prefix-caching")
    return tuple(command)
