"""What a system says about its cores, and a process that is started on some of them."""

from __future__ import annotations

import os
from pathlib import Path

from launch_builders import process

from trtx.launch.children import RealChild
from trtx.launch.cores import cores_taken, cpu_cores, cpus_of, numa_node_of, numa_nodes
from trtx.topology import NumaNode


def written(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_nodes_cores_and_threads_are_read(tmp_path: Path) -> None:
    for node, cpus in ((0, "0-1,4-5"), (1, "2-3,6-7"), (2, "")):  # the last one has memory alone
        written(tmp_path / "node" / f"node{node}" / "cpulist", cpus)
    for cpu in range(8):
        written(tmp_path / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}")
    assert numa_nodes(tmp_path) == (NumaNode(0, ((0, 4), (1, 5))), NumaNode(1, ((2, 6), (3, 7))))
    assert numa_nodes(tmp_path / "absent") == ()


def test_the_node_of_a_gpu_is_read_by_nvmls_address(tmp_path: Path) -> None:
    written(tmp_path / "0000:3b:00.0" / "numa_node", "1")
    written(tmp_path / "0000:5e:00.0" / "numa_node", "-1")
    assert numa_node_of("00000000:3B:00.0", tmp_path) == 1
    assert numa_node_of("00000000:5E:00.0", tmp_path) is None
    assert numa_node_of("00000000:99:00.0", tmp_path) is None


def test_cores_that_were_chosen_for_this_process_are_left_alone(tmp_path: Path) -> None:
    written(tmp_path / "cpu" / "online", "0-1023")
    assert "has chosen the cores" in cores_taken(tmp_path) or "cgroup" in cores_taken(tmp_path)
    assert (cpus_of("0-3,8"), cpus_of("")) == ((0, 1, 2, 3, 8), ())
    assert 1 <= cpu_cores() <= len(os.sched_getaffinity(0))


def test_a_process_with_cpus_runs_on_them_alone(tmp_path: Path) -> None:
    first = min(os.sched_getaffinity(0))
    spec = process(tmp_path, "agg-0", "import time; time.sleep(60)", cpus=(first,))
    spec.log_path.parent.mkdir(parents=True)
    child = RealChild(spec)
    try:
        assert os.sched_getaffinity(child.pid) == {first}
    finally:
        child.kill_group()
        while child.poll() is None:
            pass
