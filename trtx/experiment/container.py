"""What a process can detect about its container and the limits of its control group."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from trtx.runs.forms import Container

_PODMAN_IMAGE = re.compile(r'^image="([^"]+)"$', re.MULTILINE)
_OS_NAME = re.compile(r'^PRETTY_NAME="?([^"\n]+)"?$', re.MULTILINE)


def find_container(environment: Mapping[str, str], root: Path = Path("/")) -> Container | None:
    """Detects the container. None if there is no sign of one.

    The image is visible inside podman and Apptainer containers, but not in Docker or Kubernetes. ``environment`` is
    this process's; ``root`` is the root of the file system.
    """
    product, build = environment.get("NVIDIA_PRODUCT_NAME"), environment.get("NVIDIA_BUILD_ID")
    nvidia = " build ".join(part for part in (product, build) if part) or None
    apptainer = environment.get("APPTAINER_CONTAINER") or environment.get("SINGULARITY_CONTAINER")
    podman = _text(root / "run" / ".containerenv")
    if apptainer:
        return Container("apptainer", PurePosixPath(apptainer).name, nvidia)
    if podman is not None:
        image = _PODMAN_IMAGE.search(podman)
        return Container("podman", image[1] if image else None, nvidia)
    if "KUBERNETES_SERVICE_HOST" in environment:
        return Container("kubernetes", None, nvidia)
    if (root / ".dockerenv").exists():
        return Container("docker", None, nvidia)
    if kind := environment.get("container"):  # set by systemd-nspawn, LXC and others
        return Container(kind, None, nvidia)
    return Container("of an unknown kind", None, nvidia) if nvidia else None


def os_name(root: Path = Path("/")) -> str | None:
    """The distribution's name for itself."""
    found = _OS_NAME.search(_text(root / "etc" / "os-release") or "")
    return found[1] if found else None


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """Limit of this control group (version 2); None without one."""
    limit = (_text(root / "sys" / "fs" / "cgroup" / "memory.max") or "").strip()
    return int(limit) if limit.isdigit() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
