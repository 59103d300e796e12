"""Prepares the environment for TensorRT-LLM: no variables of other MPI jobs, unique names, recipe settings."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping, MutableMapping

# Set by Slurm and MPI launchers in every process below them. An engine that starts its own ranks on one node would read
# them in MPI_Init and join, or wait for, a job that it is not part of (ai-dynamo/dynamo #808).
_JOB_PREFIXES = ("SLURM", "SRUN_", "PMI", "OMPI_", "ORTE_", "PRTE_")
# Site settings from containers and administrators, unrelated to a job.
_SITE_PREFIXES = ("OMPI_MCA_btl", "OMPI_MCA_pml", "OMPI_MCA_coll")

# The shipped engine configs are derived from 852 published worker configs of InferenceX@843c6254 and
# srt-slurm@c88ef731. All of them, 847 and 791 of them set these three variables, in this order. A value set by the
# caller takes precedence.
RECIPE_VARIABLES = {
    "TRTLLM_WORKER_DISABLE_GC": "1",  # the step loop does not pause for Python's garbage collector
    "NCCL_GRAPH_MIXING_SUPPORT": "0",  # CUDA graphs and plain launches share one stream
    # programmatic dependent launch: a kernel starts before the previous one has ended; compute capability 9.0 and up
    "TRTLLM_ENABLE_PDL": "1",
}


_LAUNCHED = "TLLM_SPAWN_PROXY_PROCESS"  # set by trtllm-llmapi-launch for the command that it starts


def has_launched_ranks(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether trtllm-llmapi-launch has started the engine's ranks, on this node and possibly on others.

    The engine then starts no ranks itself, and this process sees the GPUs of its own node only.
    """
    return environment.get(_LAUNCHED) == "1"


def is_job_variable(name: str) -> bool:
    """Whether an environment variable ties a process to a Slurm or MPI job that it is not part of."""
    return name.startswith(_JOB_PREFIXES) and not name.startswith(_SITE_PREFIXES)


def job_variables(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if is_job_variable(name))


def prepare(environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Prepares this process's environment for one engine. Call it before importing ``tensorrt_llm``.

    Returns the names of the removed variables. ``TRTLLM_EPLB_SHM_NAME`` must differ between launches on a host, or two
    engines would share expert statistics. Ranks started by a launcher already have the same value from its environment.
    """
    cleared = job_variables(environment)
    for name in cleared:
        del environment[name]
    for name, value in RECIPE_VARIABLES.items():
        environment.setdefault(name, value)
    environment.setdefault("TLLM_LOG_LEVEL", "INFO")  # a load takes minutes and logs its progress at this level
    if not (has_launched_ranks(environment) and "TRTLLM_EPLB_SHM_NAME" in environment):
        environment["TRTLLM_EPLB_SHM_NAME"] = f"trtx_eplb_{os.getpid()}_{secrets.token_hex(4)}"
    return cleared
