"""The caller's ``DYN_*`` variables: which of them reach which processes, and what to use instead of the others.

Tuning variables reach the processes that read them, and replace trtx's own default. trtx sets addresses, ports,
discovery and namespaces itself, because with other values a process would join another system. The names are those of
Dynamo 1.6.1. Pods and Slurm jobs get no variable of the caller: set it in the manifest, or in the batch file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from trtx.config import TopologySpec
from trtx.config.secrets import without_secrets
from trtx.topology import Plan, ProcessRole

_PREFIX = "DYN_"
Readers = Literal["frontends", "workers", "all processes"]


@dataclass(frozen=True, slots=True)
class PassedVariable:
    """A variable that reaches ``readers``. A ``name`` that ends in ``*`` is a prefix of names."""

    name: str
    readers: Readers
    why: str
    option: str = ""  # the option that decides instead, if it is given

    def covers(self, name: str) -> bool:
        return name.startswith(self.name[:-1]) if self.name.endswith("*") else name == self.name

    def reaches(self, role: ProcessRole) -> bool:
        return self.readers == "all processes" or (self.readers == "frontends") == (role == "frontend")


PASSED = (
    PassedVariable("DYN_LOG", "all processes", "levels of the logs, also by module", "--log-level"),
    PassedVariable("DYN_LOGGING_JSONL", "all processes", "logs as JSON lines", "--log-format"),
    PassedVariable("DYN_LOGGING_CONSOLE_FORMAT", "all processes", "format of the logs"),
    PassedVariable("DYN_LOGGING_SPAN_EVENTS", "all processes", "begin and end of each span in the logs"),
    PassedVariable("DYN_LOG_USE_LOCAL_TZ", "all processes", "time zone of the logs"),
    PassedVariable("DYN_SDK_DISABLE_ANSI_LOGGING", "all processes", "colours in the logs"),
    PassedVariable("DYN_RUNTIME_NUM_WORKER_THREADS", "all processes", "threads of the runtime"),
    PassedVariable("DYN_RUNTIME_MAX_BLOCKING_THREADS", "all processes", "threads of the runtime that may block"),
    PassedVariable("DYN_COMPUTE_*", "all processes", "threads of the runtime that compute"),
    PassedVariable("DYN_ENABLE_POLL_HISTOGRAM", "all processes", "a metric of the runtime's polls"),
    PassedVariable("DYN_TCP_TLS_*", "all processes", "certificates of requests and answers between processes"),
    PassedVariable("DYN_TCP_CONNECT_TIMEOUT", "all processes", "time limit of a connection between processes"),
    PassedVariable("DYN_TCP_LISTEN_BACKLOG", "all processes", "connections that may wait to be accepted"),
    PassedVariable("DYN_TCP_POOL_SIZE", "frontends", "connections to each worker"),
    PassedVariable("DYN_TCP_CHANNEL_BUFFER", "frontends", "requests that share a connection"),
    PassedVariable("DYN_TCP_REQUEST_TIMEOUT", "frontends", "time limit for a worker to receive a request"),
    PassedVariable("DYN_TCP_WORKER_POOL_SIZE", "workers", "requests that a worker takes at once"),
    PassedVariable("DYN_TCP_WORK_QUEUE_SIZE", "workers", "requests that a worker's connection queues"),
    PassedVariable("DYN_ZMQ_IO_THREADS", "all processes", "threads of the event plane"),
    PassedVariable("DYN_ZMQ_EVENT_SUBSCRIBER_CHANNEL_CAPACITY", "all processes", "events that may wait"),
    PassedVariable("DYN_HTTP_OVERLOAD_STATUS_CODE", "frontends", "status of a request that is refused for overload"),
    PassedVariable("DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS", "frontends", "time limit of a silent stream"),
    PassedVariable("DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS", "frontends", "comments in a silent stream"),
    PassedVariable("DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS", "frontends", "wait for a refusal before a stream's 200"),
    PassedVariable("DYN_HTTP_LISTEN_BACKLOG", "frontends", "connections that may wait to be accepted"),
    PassedVariable("DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD", "frontends", "KV use at which a worker counts as busy"),
    PassedVariable("DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD*", "frontends", "prefill at which a worker counts as busy"),
    PassedVariable("DYN_MIGRATION_MAX_SEQ_LEN", "frontends", "longest sequence that migrates"),
    PassedVariable("DYN_ROUTER_PREFILL_POLICY", "frontends", "choice of a prefill worker"),
    PassedVariable("DYN_ROUTER_DECODE_POLICY", "frontends", "choice of a decode worker"),
    PassedVariable("DYN_ROUTER_QUEUE_THRESHOLD", "frontends", "load at which the KV router queues"),
    PassedVariable("DYN_ROUTER_QUEUE_POLICY", "frontends", "order of the KV router's queue"),
    PassedVariable("DYN_ROUTER_TEMPERATURE", "frontends", "randomness of the KV router's choice"),
    PassedVariable("DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT*", "frontends", "weight of a cached prefix"),
    PassedVariable("DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT", "frontends", "weight of a running request"),
    PassedVariable("DYN_ROUTER_EVENT_THREADS", "frontends", "threads that read KV events"),
    PassedVariable("DYN_ROUTER_TTL_SECS", "frontends", "life of a predicted prefix"),
    PassedVariable("DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS", "frontends", "life of a request's load in the router"),
    PassedVariable("DYN_TOKENIZER*", "frontends", "tokenizer backend and its cache"),
    PassedVariable("DYN_FRONTEND_JEMALLOC", "frontends", "memory allocator"),
    PassedVariable("DYN_FRONTEND_FD_LIMIT_TARGET", "frontends", "limit of open files"),
    PassedVariable("DYN_METRICS_TTFT*", "frontends", "buckets of a histogram"),
    PassedVariable("DYN_METRICS_ITL*", "frontends", "buckets of a histogram"),
    PassedVariable("DYN_METRICS_REQUEST_DURATION*", "frontends", "buckets of a histogram"),
    PassedVariable("DYN_METRICS_INPUT_SEQUENCE*", "frontends", "buckets of a histogram"),
    PassedVariable("DYN_METRICS_OUTPUT_SEQUENCE*", "frontends", "buckets of a histogram"),
    PassedVariable("DYN_REQUEST_TRACE*", "frontends", "a record of each request, without its text"),
    PassedVariable("DYN_FORWARDPASS_METRIC_PORT", "workers", "set to any port: forward-pass metrics for a planner"),
    PassedVariable("DYN_FPM_*", "workers", "forward-pass metrics, also in files"),
    PassedVariable("DYN_HEALTH_CHECK_ENABLED", "workers", "canary requests behind `/health` of a system port"),
    PassedVariable("DYN_HEALTH_CHECK_REQUEST_TIMEOUT", "workers", "time limit of a canary request"),
    PassedVariable("DYN_CANARY_WAIT_TIME", "workers", "silence after which a canary request is sent"),
)
"""The variables that are passed on. ``make reference`` writes them into docs/reference/environment.md."""

_SETS = "trtx sets it"
_ROUTER_ARGS = "use --router-args"
_BOUNDS = "Dynamo 1.6.1 ignores it; use --max-queued-requests"
INSTEAD: Mapping[str, str] = {
    "DYN_NAMESPACE*": _SETS,
    "DYN_DISCOVERY_BACKEND": _SETS,
    "DYN_FILE_KV": _SETS,
    "DYN_REQUEST_PLANE*": _SETS,
    "DYN_RESPONSE_PLANE": _SETS,
    "DYN_EVENT_PLANE*": _SETS,
    "DYN_ZMQ_BROKER*": _SETS,
    "DYN_TCP_RPC_*": _SETS,
    "DYN_TCP_RESPONSE_STREAM_*": _SETS,
    "DYN_TCP_MAX_MESSAGE_SIZE": "use --max-media-bytes",
    "DYN_SYSTEM_*": _SETS,
    "DYN_HTTP_HOST": "use --host",
    "DYN_HTTP_PORT": "use --port",
    "DYN_HTTP_BODY_LIMIT_MB": "use --max-media-bytes",
    "DYN_MM_MAX_DATA_URL_MB": "use --max-media-bytes",
    "DYN_TLS_CERT_PATH": "use --tls-cert",
    "DYN_TLS_KEY_PATH": "use --tls-key",
    "DYN_MODEL_NAME": "use --served-model-name",
    "DYN_MODEL_PATH": "use --model",
    "DYN_TOOL_CALL_PARSER": "use --tool-call-parser",
    "DYN_REASONING_PARSER": "use --reasoning-parser",
    "DYN_CUSTOM_JINJA_TEMPLATE": "use --chat-template",
    "DYN_TRTLLM_*": "use --config or --set",
    "DYN_KVBM_*": "trtx runs neither KVBM nor its consolidator of KV events; routers get the engine's own events",
    "DYN_ENGINE_REQUEST_LIMIT": _BOUNDS,
    "DYN_DYNAMO_REQUEST_QUEUE_LIMIT": _BOUNDS,
    "DYN_ROUTER_MODE": "use --router-mode",
    "DYN_ROUTER_CONDITIONAL_DISAGG*": "use --conditional-disagg",
    "DYN_ROUTER_*": _ROUTER_ARGS,
    "DYN_MIGRATION_LIMIT": _ROUTER_ARGS,
    "DYN_ENABLE_ANTHROPIC_API": _ROUTER_ARGS,
    "DYN_REASONING_FIELD_NAME": _ROUTER_ARGS,
    "DYN_METRICS_PREFIX": _ROUTER_ARGS,
    "DYN_KV_CACHE_BLOCK_SIZE": _ROUTER_ARGS,
}
"""What to use instead of a variable that is not passed on; the first matching name decides."""


def with_caller_variables(plan: Plan, caller: Mapping[str, str], given: frozenset[str] = frozenset()) -> Plan:
    """Returns ``plan`` with the variables of the caller's environment that its processes read, and notes about them.

    ``given``: the options that the user gave and that decide instead of a variable.
    """
    caller = {name: value for name, value in without_secrets(caller).items() if name.startswith(_PREFIX)}
    passed = {name: row for name in sorted(caller) if (row := passed_by(name)) is not None and row.option not in given}
    processes = tuple(
        replace(one, env={**one.env, **{name: caller[name] for name, row in passed.items() if row.reaches(one.role)}})
        for one in plan.processes
    )
    where = " of this host" if plan.hosts else ""
    notes = [f"{name} of your environment reaches {row.readers}{where} ({row.why})" for name, row in passed.items()]
    left = sorted(caller.keys() - passed.keys())
    warnings = (_left_out(left, given),) if left else ()
    return replace(plan, processes=processes, reasons=(*plan.reasons, *notes), warnings=(*plan.warnings, *warnings))


def options_given(spec: TopologySpec) -> frozenset[str]:
    """The options of ``spec`` that were given and that decide instead of a variable."""
    values = {"--log-level": spec.log_level, "--log-format": spec.log_format}
    return frozenset(option for option, value in values.items() if value is not None)


def passed_by(name: str) -> PassedVariable | None:
    """The row that says to which processes a variable is passed on; None if it is not passed on."""
    return next((row for row in PASSED if row.covers(name)), None)


def _left_out(names: list[str], given: frozenset[str]) -> str:
    named = ", ".join(name + "".join(f" ({hint})" for hint in _hints(name, given)) for name in names)
    return f"not passed on from your environment: {named}; docs/reference/environment.md lists what is"


def _hints(name: str, given: frozenset[str]) -> Iterator[str]:
    row = passed_by(name)
    if row is not None and row.option in given:
        yield f"{row.option} is given"
        return
    for known, hint in INSTEAD.items():
        if name == known or (known.endswith("*") and name.startswith(known[:-1])):
            yield hint
            return
