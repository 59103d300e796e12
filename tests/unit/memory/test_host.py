"""Host memory for the host tier: what the machine and the container can give, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtx.memory.host import HostMemory, host_cache_shortage, host_cache_too_small, host_memory

GIB = 1 << 30


def _machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {64 << 20} kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 64 * GIB),
        ({"sys/fs/cgroup/memory.max": "max\n"}, 64 * GIB),
        (
            {
                "sys/fs/cgroup/memory.max": f"{20 * GIB}\n",
                "sys/fs/cgroup/memory.current": f"{12 * GIB}",
                "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {4 * GIB}\n",
            },
            12 * GIB,
        ),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}",
            },
            5 * GIB,
        ),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, 64 * GIB),
    ],
)
def test_the_smaller_of_machine_and_container_is_available(
    files: dict[str, str], available: int, tmp_path: Path
) -> None:
    assert host_memory(_machine(tmp_path, files)).available == available


def test_a_machine_that_says_nothing_refuses_nothing(tmp_path: Path) -> None:
    memory = host_memory(tmp_path)
    assert memory.available is None
    assert host_cache_shortage(1 << 60, memory) is None


def test_a_shortage_names_the_container_where_its_limit_is_the_cause() -> None:
    assert host_cache_shortage(4 * GIB, HostMemory(8 * GIB, None, None, None)) is None
    machine = host_cache_shortage(9 * GIB, HostMemory(8 * GIB, None, None, None))
    assert machine == "kv_cache_config.host_cache_size is 9.00 GiB, and this machine has 8.00 GiB of memory; lower it"
    ranks = host_cache_shortage(3 * GIB, HostMemory(8 * GIB, None, None, None), 4)
    assert ranks is not None and "is 3.00 GiB for each of 4 GPUs, 12.00 GiB together, and this machine has" in ranks
    assert host_cache_shortage(2 * GIB, HostMemory(8 * GIB, None, None, None), 4) is None
    container = host_cache_shortage(9 * GIB, HostMemory(64 * GIB, 10 * GIB, 8 * GIB, None))
    assert container is not None
    assert container.endswith(
        "the container's limit of 10.00 GiB leaves 8.00 GiB of memory; lower it, or raise the container's memory limit"
    )


def test_a_tier_holds_a_block_of_every_group() -> None:
    assert host_cache_too_small(300, 100, 3) is None
    refused = host_cache_too_small(299, 100, 3)
    assert refused is not None and "one block of 100 bytes for each of its 3 KV cache groups" in refused
