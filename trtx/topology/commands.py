"""Command lines and environment of each process.

On one machine Dynamo runs without etcd or NATS, on loopback alone, shared with nobody; over hosts it finds its parts in
etcd, its events go through NATS, and each process listens on the address of its host alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtx.config import Role, TopologySpec
from trtx.config.media import MediaLimits
from trtx.topology.plan import TOPOLOGY_VARIABLE, EtcdService, NatsService

# Streams that stay silent for this long are broken off by the frontend; a long prompt on a CPU stays far below it.
_STREAM_TIMEOUT_S = 300
KV_ROUTER_FLAGS = ("--router-prefill-load-scale", "4", "--router-predicted-ttl-secs", "5")
"""Dynamo 1.4.2's own scale of 1 counts a block that has to be computed as much as one that a running request holds, so
that one running request outweighs a cached prefix of its length; and without prediction a prefix is unknown to the
router while its first request is still computing it. docs/performance.md, "KV-aware routing", has both measured."""
_OF_THE_TOPOLOGY = "which trtx sets for each topology, to keep it apart from others and on loopback"
OWNED_FRONTEND_FLAGS = {
    "--http-host": "which is trtx's own --host",
    "--http-port": "which is trtx's own --port",
    "--router-mode": "which is trtx's own --router-mode",
    "--model-name": "which is trtx's own --served-model-name",
    "--model-path": "which is trtx's own --model",
    "--namespace": _OF_THE_TOPOLOGY,
    "--namespace-prefix": _OF_THE_TOPOLOGY,
    "--discovery-backend": _OF_THE_TOPOLOGY,
    "--request-plane": _OF_THE_TOPOLOGY,
    "--event-plane": _OF_THE_TOPOLOGY,
    "--broker-xsub": _OF_THE_TOPOLOGY,
    "--broker-xpub": _OF_THE_TOPOLOGY,
    "--prompts-of": "which is trtx's own --model",
    "--tls-cert-path": "which is trtx's own --tls-cert",
    "--tls-key-path": "which is trtx's own --tls-key",
    "--kserve-grpc-server": "with which the frontend serves no HTTP, and trtx could not tell whether it is ready",
    "--interactive": "with which the frontend serves no HTTP, and trtx could not tell whether it is ready",
    "-i": "with which the frontend serves no HTTP, and trtx could not tell whether it is ready",
    "--version": "with which the frontend ends at once",
    "--help": "with which the frontend ends at once",
    "-h": "with which the frontend ends at once",
}
"""Flags of dynamo.frontend 1.4.2 that no ``--router-args`` may hold, and why. The last of a kind would win."""
_MIGRATION_LIMIT = 3
_LOOPBACK = "127.0.0.1"
LOOPBACK_DEVICE = "lo"
_MIB = 1 << 20
LEAST_BODY_MIB = 45
"""Of one HTTP request: more is a 413. Dynamo 1.4.2's own default, said so that what follows from it holds. A body costs
whoever streams beside it, by its size (docs/performance.md, "A text stream beside hostile media")."""
MOST_BODY_MIB = 256
"""However large a medium may be: the frontend holds each body whole, and its message's length is written in 32 bits."""
_BODY_MARGIN_MIB = 2  # for the words beside an image
_MESSAGE_FOR_BODY = 6  # an inline image is twice in a message, decode's has prefill's answer too, and room to spare
LEAST_MESSAGE_BYTES = 256 * _MIB
_ACKNOWLEDGED_S = _STREAM_TIMEOUT_S
"""How long a frontend waits, on one machine, until a worker has all of a request and says so. Large bodies on busy
cores take longer than Dynamo 1.4.2's own 5 s, and a worker that misses them is out of the routing for seconds: a 503
for everybody where it is the only one. A worker that ends closes its connections; one that is stopped has no discovery
records after 10 s and is ended by the launcher, so that its requests wait for that and no longer."""
# A worker without traffic for this long is sent one token's work; what it answers to clients counts as well.
_CANARY_WAIT_S = 5
# Generous: an engine in the middle of a long prompt is busy, not dead, and Dynamo's default is 3.
_CANARY_TIMEOUT_S = 30


@dataclass(frozen=True, slots=True)
class Broker:
    """Of events, on one machine: the ports that publishers and subscribers connect to."""

    xsub: int
    xpub: int


def body_mib(media: MediaLimits) -> int:
    """Of one HTTP request, in MiB: a file of ``max_media_bytes`` fits as a ``data:`` URL in base64, within bounds."""
    base64_bytes = (media.max_media_bytes + 2) // 3 * 4
    return min(MOST_BODY_MIB, max(LEAST_BODY_MIB, -(-base64_bytes // _MIB) + _BODY_MARGIN_MIB))


def largest_inline_bytes(media: MediaLimits) -> int:
    """The largest file of one medium that gets through as a ``data:`` URL, alone in its request."""
    return min(media.max_media_bytes, (body_mib(media) - _BODY_MARGIN_MIB) * _MIB // 4 * 3)


def message_bytes(media: MediaLimits) -> int:
    """Of one message between frontend and worker. One that is too large costs the worker its place in the routing (seen
    with Dynamo 1.4.2's own 32 MiB: every request is a 503 for 3.6 s), so the limit on bodies comes first, by far."""
    return max(LEAST_MESSAGE_BYTES, _MESSAGE_FOR_BODY * body_mib(media) * _MIB)


def shared_environment(namespace: str, group: str, scratch_dir: Path, media: MediaLimits) -> dict[str, str]:
    """What every process of a topology gets on one machine, frontends and workers alike. Seen with Dynamo 1.4.2.

    ``group``: see :func:`trtx.topology.plan.group_of`. ``TMPDIR``: every Dynamo process leaves the file of its logging
    configuration where temporary files are.
    """
    return {
        TOPOLOGY_VARIABLE: group,
        "DYN_NAMESPACE": namespace,
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_LOG": "warn",
        "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(scratch_dir),
        "DYN_TCP_MAX_MESSAGE_SIZE": str(message_bytes(media)),
    }


def local_environment(scratch_dir: Path, brokers: Sequence[Broker]) -> dict[str, str]:
    """How the processes of one machine find and hear each other.

    ``DYN_TCP_RESPONSE_STREAM_HOST`` takes the name of an interface: an address there means that no model is ever added.
    ``DYN_ZMQ_BROKER_URL`` keeps the event plane, which carries prompt token ids, from binding every interface. Each
    frontend has a broker, everybody talks to all of them, and an event that comes twice counts once: so none that ends
    takes the events of the others with it.
    """
    xsub = ";".join(f"tcp://{_LOOPBACK}:{broker.xsub}" for broker in brokers)
    xpub = ";".join(f"tcp://{_LOOPBACK}:{broker.xpub}" for broker in brokers)
    return {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(scratch_dir / "kv"),
        "DYN_EVENT_PLANE": "zmq",
        "DYN_TCP_RPC_HOST": _LOOPBACK,
        "DYN_TCP_RESPONSE_STREAM_HOST": "lo",
        "DYN_TCP_REQUEST_TIMEOUT": str(_ACKNOWLEDGED_S),
        "DYN_ZMQ_BROKER_URL": f"xsub={xsub} , xpub={xpub}",
    }


def remote_environment(etcd: EtcdService, nats: NatsService, address: str, request_port: int | None) -> dict[str, str]:
    """The same over hosts, of one process. Secrets are not in it: they come when it starts. ``request_port`` None: the
    system's choice.

    ``DYN_TCP_RESPONSE_STREAM_HOST`` is left out. Of the interface that it names Dynamo 1.4.2 takes the address listed
    last, normally an IPv6 link-local one, which it can't bind; left out it takes the address of the default route.
    """
    port = {} if request_port is None else {"DYN_TCP_RPC_PORT": str(request_port)}
    return port | {
        "DYN_DISCOVERY_BACKEND": "etcd",
        "ETCD_ENDPOINTS": ",".join(etcd.endpoints),
        "ETCD_LEASE_TTL": str(etcd.lease_ttl_s),
        "DYN_EVENT_PLANE": "nats",
        "NATS_SERVER": nats.url,
        "DYN_TCP_RPC_HOST": address,
    }


def frontend_environment(media: MediaLimits) -> dict[str, str]:
    """No admin routes, and no stream that waits for ever on a worker that went away."""
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "DYN_DISABLE_FRONTEND_ADMIN_API": "1",
        "DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS": str(_STREAM_TIMEOUT_S),
        "DYN_HTTP_BODY_LIMIT_MB": str(body_mib(media)),
    }


def response_environment(port: int) -> dict[str, str]:
    """Of a frontend over hosts: where workers stream their answers to."""
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
    """One worker's GPUs, metrics port and threads (None: the engine's own choice). Drains without a fixed grace.

    ``gpus``: UUIDs, or indices where the machine is another. ``address``: of the system port, from which frontends of
    other hosts take the model's files too. ``device``: of UCX, for KV, with ``kv_ports`` where its TCP listens.

    The canary is what makes ``/health`` and ``/live`` of the system port tell the truth: without it Dynamo 1.4.2
    answers 503 for ever. Nothing but that answer depends on it.
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
    """Of a worker that computes on the CPU."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def frontend_command(
    spec: TopologySpec,
    namespace: str,
    host: str,
    port: int,
    *,
    broker: Broker | None,
    is_one_of_many: bool,
    prompts_of: Path | None = None,
) -> tuple[str, ...]:
    """Dynamo's frontend through ours. ``--namespace`` keeps it from listing models of another topology.

    ``broker``: the one that it runs, on one machine. ``is_one_of_many``: its router then hears from the
    others which worker has how much to do; by itself it would know of its own requests alone. ``prompts_of``: the model
    whose prompts transformers makes in the frontend where Dynamo's may differ.
    """
    command = [sys.executable, "-m", "trtx.frontend", "--http-host", host, "--http-port", str(port)]
    if broker is not None:
        command += ["--broker-xsub", f"tcp://{_LOOPBACK}:{broker.xsub}"]
        command += ["--broker-xpub", f"tcp://{_LOOPBACK}:{broker.xpub}"]
    command += ["--namespace", namespace]
    if prompts_of is not None:
        command += ["--prompts-of", str(prompts_of)]
    if spec.tls_cert is not None:
        command += ["--tls-cert-path", str(spec.tls_cert), "--tls-key-path", str(spec.tls_key)]
    command += ["--router-mode", spec.router_mode, "--migration-limit", str(_MIGRATION_LIMIT)]
    if spec.router_mode == "kv":
        command += KV_ROUTER_FLAGS
        if is_one_of_many:
            command.append("--router-replica-sync")
    return tuple(command) + spec.router_args


def worker_command(
    role: Role,
    name: str,
    *,
    engine: str,
    model_path: Path,
    model: str,
    config: Path,
    status_file: Path,
    has_encoders: bool,
    deterministic: bool,
    media: MediaLimits,
    prompts_by_frontend: bool,
) -> tuple[str, ...]:
    """One worker of ours, as docs/architecture.md has it. ``has_encoders``: its topology has encode workers."""
    command = [sys.executable, "-m", "trtx.worker", "--role", role, "--engine", engine]
    command += ["--model", str(model_path), "--served-model-name", model]
    command += ["--engine-config", str(config), "--name", name, "--status-file", str(status_file)]
    if has_encoders and role != "encode":
        command += ["--encoders", "remote"]
    if deterministic and role != "encode":
        command.append("--deterministic")
    if prompts_by_frontend:
        command += ["--prompts-by", "frontend"]
    if limits := media.model_dump_json(exclude_defaults=True).removeprefix("{}"):
        command += ["--media", limits]
    return tuple(command)


def simulated_command(
    role: Role, namespace: str, *, model_path: Path, model: str, values: Mapping[str, Any]
) -> tuple[str, ...]:
    """Dynamo's mocker with TensorRT-LLM's scheduler; the engine config's limits become its flags."""
    component = "prefill" if role == "prefill" else "backend"
    command = [sys.executable, "-m", "dynamo.mocker", "--engine-type", "trtllm", "--disaggregation-mode", role]
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
