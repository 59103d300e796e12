"""What is told of the container, from a file system as each kind of it leaves its traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtx.experiment.container import find_container, memory_limit_bytes, os_name
from trtx.runs.forms import Container

PODMAN = 'engine="podman-5"\nimage="repo/serve:1.2"\n'
NGC = {"NVIDIA_PRODUCT_NAME": "TensorRT-LLM", "NVIDIA_BUILD_ID": "123"}


@pytest.mark.parametrize(
    ("files", "environment", "found"),
    [
        ({}, {}, None),
        ({".dockerenv": ""}, {}, Container("docker", None, None)),
        ({".dockerenv": ""}, NGC, Container("docker", None, "TensorRT-LLM build 123")),
        ({"run/.containerenv": PODMAN}, {}, Container("podman", "repo/serve:1.2", None)),
        ({"run/.containerenv": ""}, {}, Container("podman", None, None)),
        ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, Container("kubernetes", None, None)),
        ({}, {"APPTAINER_CONTAINER": "/home/me/serve.sif"}, Container("apptainer", "serve.sif", None)),
        ({}, {"container": "lxc"}, Container("lxc", None, None)),
        ({}, {"NVIDIA_BUILD_ID": "123"}, Container("of an unknown kind", None, "123")),
    ],
)  # fmt: skip
def test_a_container_is_told_as_far_as_its_traces_go(
    tmp_path: Path, files: dict[str, str], environment: dict[str, str], found: Container | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert find_container(environment, tmp_path) == found


@pytest.mark.parametrize(("text", "limit"), [("17179869184\n", 2**34), ("max\n", None), (None, None)])
def test_the_memory_of_a_control_group_is_a_number_or_not_known(
    tmp_path: Path, text: str | None, limit: int | None
) -> None:
    if text is not None:
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup/memory.max").write_text(text)
    assert memory_limit_bytes(tmp_path) == limit


def test_the_distribution_is_called_as_it_calls_itself(tmp_path: Path) -> None:
    assert os_name(tmp_path) is None
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text('NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.2 LTS"\n')
    assert os_name(tmp_path) == "Ubuntu 24.04.2 LTS"
