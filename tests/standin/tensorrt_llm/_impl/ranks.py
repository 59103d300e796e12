"""What starting ranks is like: a launcher's variables break it, GPUs are counted, processes stay behind.

The torch engine's process is rank 0 and does all the work. The others only wait, end when their parent closes their
stdin, and end by themselves after ``RANK_LIFE_SECONDS``.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tensorrt_llm._standin import FAULTS, RANK_LIFE_SECONDS

_LAUNCHERS = ("SLURM_", "PMI_", "PMI2_", "PMIX_", "OMPI_", "ORTE_")
_HARMLESS = ("OMPI_MCA_",)  # a site's settings, no launch
_WAIT = "import select, sys; select.select([sys.stdin], [], [], float(sys.argv[1]))"
_STAY = "import sys, time; time.sleep(float(sys.argv[1]))"
_NAME = "tensorrt_llm-rank"  # the last word of a rank's command line, for whoever looks for ranks


def refuse_launcher_variables(environment: Mapping[str, str]) -> None:
    """A start from within ``srun`` or ``mpirun`` fails, unless trtllm-llmapi-launch has started the ranks."""
    if environment.get("TLLM_SPAWN_PROXY_PROCESS") == "1":
        return
    found = sorted(name for name in environment if name.startswith(_LAUNCHERS) and not name.startswith(_HARMLESS))
    if found:
        raise RuntimeError(
            f"MPI_Init_thread failed: the environment is a launcher's ({', '.join(found)}); "
            "clear these variables for a start on one node"
        )


def world_size(args: Any) -> int:
    if args.backend == "_autodeploy":
        return max(1, args.world_size)
    return args.tensor_parallel_size * args.pipeline_parallel_size * args.context_parallel_size


def ranks_per_node(args: Any) -> int:
    """Each node of an engine has equally many; where the config is silent, all are on this one."""
    size = world_size(args)
    return size // math.ceil(size / (args.gpus_per_node or size))


class Ranks:
    """The rank processes beside the torch engine's; none where trtllm-llmapi-launch has started them."""

    def __init__(self, size: int, per_node: int) -> None:
        if size > 1 and (available := _device_count()) < per_node:
            raise RuntimeError(f"Only {available} GPUs are available, but {per_node} are required.")
        is_launched = os.environ.get("TLLM_SPAWN_PROXY_PROCESS") == "1"
        self._waiting = [] if is_launched else [_start(_WAIT, f"{rank}/{size}") for rank in range(1, size)]
        if "leave-rank" in FAULTS:
            left = _start(_STAY, "left", start_new_session=True)
            sys.stderr.write(f"tensorrt_llm stand-in: rank {left.pid} will stay behind\n")

    def shutdown(self) -> None:
        for process in self._waiting:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._waiting:
            process.wait()
        self._waiting = []


def _start(code: str, name: str, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-S", "-c", code, str(RANK_LIFE_SECONDS), _NAME, name]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options
    )


def _device_count() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1", "NoDevFiles")])
    import torch

    return torch.cuda.device_count()
