"""What TensorRT-LLM needs around it: no other job's MPI, names of its own, the recipes' switches."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping, MutableMapping

# Left by Slurm and by MPI's launchers in every process under them. An engine that starts its own ranks on one node
# finds them in MPI_Init and joins, or waits for, a job that is not its own (ai-dynamo/dynamo #808).
_JOB_PREFIXES = ("SLURM", "SRUN_", "PMI", "OMPI_", "ORTE_", "PRTE_")
# Settings of a site, which containers and administrators put there, not traces of a job.
_SITE_PREFIXES = ("OMPI_MCA_btl", "OMPI_MCA_pml", "OMPI_MCA_coll")

# Set in the 852 published worker configs of InferenceX@843c6254 and srt-slurm@c88ef731 from which the shipped engine
# configs come: by all of them, by 847, by 791. A value that the caller has set wins.
RECIPE_VARIABLES = {
    "TRTLLM_WORKER_DISABLE_GC": "1",  # no pause of the step loop for Python's garbage collector
    "NCCL_GRAPH_MIXING_SUPPORT": "0",  # CUDA graphs and plain launches share one stream here
    "TRTLLM_ENABLE_PDL": "1",  # kernels start while the one before them ends; read on compute 9.0 and up
}


_LAUNCHED = "TLLM_SPAWN_PROXY_PROCESS"  # which trtllm-llmapi-launch sets for the command that it starts


def has_launched_ranks(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether trtllm-llmapi-launch has started the engine's ranks, on this node and maybe on others: the engine starts
    none, and this process sees the GPUs of its own node alone."""
    return environment.get(_LAUNCHED) == "1"


def is_job_variable(name: str) -> bool:
    """Whether an environment variable ties a process to a Slurm or MPI job that it is no part of."""
    return name.startswith(_JOB_PREFIXES) and not name.startswith(_SITE_PREFIXES)


def job_variables(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if is_job_variable(name))


def prepare(environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Puts this process in order for one engine, before ``tensorrt_llm`` is imported. Returns what was cleared.

    ``TRTLLM_EPLB_SHM_NAME`` must differ between launches on a host: two engines would share expert statistics. Ranks
    that a launcher has started have theirs from its environment, all the same one.
    """
    cleared = job_variables(environment)
    for name in cleared:
        del environment[name]
    for name, value in RECIPE_VARIABLES.items():
        environment.setdefault(name, value)
    environment.setdefault("TLLM_LOG_LEVEL", "INFO")  # a load takes minutes, and its steps are logged at this level
    if not (has_launched_ranks(environment) and "TRTLLM_EPLB_SHM_NAME" in environment):
        environment["TRTLLM_EPLB_SHM_NAME"] = f"trtx_eplb_{os.getpid()}_{secrets.token_hex(4)}"
    return cleared
