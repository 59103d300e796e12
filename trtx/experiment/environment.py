"""Collects machine and software of a run for its manifest."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import psutil

import trtx
from trtx.doctor import Package, gather_gpus, gather_software
from trtx.experiment.container import find_container, memory_limit_bytes, os_name
from trtx.experiment.sources import commit_of, sources_hash
from trtx.launch import probe
from trtx.runs.forms import Deployment, Environment, RecordedGpu

# Packages that affect metrics or scores: for serving, computing, tokenizing, measuring and scoring. Normalized names.
_PACKAGES = {
    "trtx", "ai-dynamo", "ai-dynamo-runtime", "aiperf", "torch", "triton", "transformers", "tokenizers", "safetensors",
    "numpy", "msgspec", "pyzmq", "uvloop", "lm-eval",
}  # fmt: skip
_FAMILIES = ("tensorrt", "nixl", "nvidia-", "cuda-", "flashinfer", "flash-attn", "cutlass")  # prefixes of package names


def environment(argv: Sequence[str], started_at: datetime, deployment: Deployment | None = None) -> Environment:
    """The environment that a reader needs to judge and reproduce metrics. Host, user and paths are omitted except in
    argv.
    """
    gpus, software = gather_gpus(), gather_software()
    package = Path(trtx.__file__).parent
    commit, commit_changes = commit_of(package.parent)
    return Environment(
        started_at=started_at.astimezone(UTC).replace(microsecond=0),
        command=shlex.join(argv),
        commit=commit,
        commit_changes=commit_changes,
        trtx_sources=sources_hash(package),
        python=software.python,
        versions=_versions(software.packages),
        torch_cuda=software.torch_cuda,
        platform=platform.platform(),
        os=os_name(),
        container=find_container(os.environ),
        cpu=_cpu_name(),
        cpu_cores=probe().cpu_cores,
        memory_bytes=psutil.virtual_memory().total,
        memory_limit_bytes=memory_limit_bytes(),
        load_average=round(os.getloadavg()[0], 2),
        gpus=tuple(
            RecordedGpu(
                gpu.uuid, gpu.name, gpu.memory_bytes, gpu.max_sm_clock_mhz, gpu.application_sm_clock_mhz,
                gpu.power_limit_w,
            )
            for gpu in gpus.visible
        ),
        sm_clocks_mhz=tuple(gpu.sm_clock_mhz for gpu in gpus.visible),
        gpu_driver=gpus.driver,
        driver_cuda=None if gpus.cuda is None else ".".join(map(str, gpus.cuda)),
        deployment=deployment,
    )  # fmt: skip


def _versions(packages: Mapping[str, Package]) -> dict[str, str]:
    """Versions of the relevant packages: trtx first, then by name."""
    kept = [name for name in packages if name in _PACKAGES or name.startswith(_FAMILIES)]
    return {name: packages[name].version for name in sorted(kept, key=lambda name: (name != "trtx", name))}


def _cpu_name() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
