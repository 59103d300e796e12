"""What a child inherits: the caller's environment without anything that would reach into another system."""

from __future__ import annotations

from collections.abc import Mapping

from trtx.engine import KV_FAULT_VARIABLE
from trtx.engine.tensorrt_llm.environment import is_job_variable

# Another Dynamo's planes and discovery: a worker that finds their variables joins them.
_DROPPED_PREFIXES = ("DYN_", "ETCD_", "NATS_", "TRTX_TOPOLOGY")
# The fault is a plan's to set, which tells of it.
_DROPPED = frozenset({"MODEL_EXPRESS_URL", "UCX_NET_DEVICES", KV_FAULT_VARIABLE})


def child_environment(inherited: Mapping[str, str], additions: Mapping[str, str]) -> dict[str, str]:
    """``inherited`` without the names above and those of another MPI job, and ``additions`` on top."""
    kept = {
        name: value
        for name, value in inherited.items()
        if name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES) and not is_job_variable(name)
    }
    return kept | dict(additions)
