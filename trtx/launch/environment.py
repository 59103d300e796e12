"""The environment of a child process: the caller's, without variables that would connect it to another system."""

from __future__ import annotations

from collections.abc import Mapping

from trtx.config.secrets import without_secrets
from trtx.engine import KV_FAULT_VARIABLE
from trtx.engine.tensorrt_llm.environment import is_job_variable

# Variables of another Dynamo's planes and discovery; a worker that finds them would join it.
_DROPPED_PREFIXES = ("DYN_", "ETCD_", "NATS_", "TRTX_TOPOLOGY")
# Processes of a topology only talk to each other, and Dynamo's HTTP client would use a proxy even for loopback.
_PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy"})  # in lower or upper case
# The planted fault may only come from a plan, which reports it.
_DROPPED = frozenset({"MODEL_EXPRESS_URL", "UCX_NET_DEVICES", KV_FAULT_VARIABLE})


def child_environment(inherited: Mapping[str, str], additions: Mapping[str, str]) -> dict[str, str]:
    """``inherited`` without the names above, secrets, and variables of MPI jobs; ``additions`` take precedence."""
    open_to_all = without_secrets(inherited)
    kept = {name: value for name, value in open_to_all.items() if not (_is_dropped(name) or is_job_variable(name))}
    return kept | dict(additions)


def _is_dropped(name: str) -> bool:
    return name in _DROPPED or name.lower() in _PROXIES or name.startswith(_DROPPED_PREFIXES)
