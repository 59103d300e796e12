"""The conditions of a run: versions, machine, commit. Written once as ``env.json``."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import psutil

import trtx
from trtx.report.forms import Deployment, Environment, Gpu
from trtx.topology import Machine

PACKAGES = ("trtx", "ai-dynamo", "aiperf", "torch", "transformers", "nixl", "tensorrt_llm")


def environment(
    argv: Sequence[str], machine: Machine, started_at: datetime, deployment: Deployment | None = None
) -> Environment:
    """What a reader needs to judge the figures and make them again. No host, user or path but the command's own."""
    return Environment(
        started_at=started_at.astimezone(UTC).replace(microsecond=0),
        command=shlex.join(argv),
        commit=_commit(),
        trtx_sources=_sources(),
        python=platform.python_version(),
        versions={name: version for name in PACKAGES if (version := _version(name)) is not None},
        platform=platform.platform(),
        cpu=_cpu_name(),
        cpu_cores=machine.cpu_cores,
        memory_bytes=psutil.virtual_memory().total,
        load_average=round(os.getloadavg()[0], 2),
        gpus=tuple(Gpu(gpu.name, gpu.memory_bytes) for gpu in machine.gpus),
        gpu_driver=_driver() if machine.gpus else None,
        deployment=deployment,
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of trtx's checkout, "+changes" when tracked files differ from it; None where trtx is installed."""
    root = Path(trtx.__file__).parent.parent
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def _sources() -> str:
    """Changes with the code that measures and serves, committed or not, and not with a commit to a document."""
    package = Path(trtx.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _cpu_name() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _driver() -> str | None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()
