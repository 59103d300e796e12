"""Workers on CPU cores: near their GPUs, on whole cores, and not at all where something else decides over them."""

from __future__ import annotations

from dataclasses import replace

from trtx.topology import Gpu, Machine, NumaNode
from trtx.topology.core_placement import cpu_ranges, place_on_cores

# Two sockets of 16 cores with two threads each, as Linux numbers them.
NODES = tuple(NumaNode(node, tuple((cpu, cpu + 32) for cpu in range(16 * node, 16 * node + 16))) for node in (0, 1))
GPUS = tuple(Gpu(index, f"GPU-{index}", "H100", 80 << 30, numa_node=index // 2) for index in range(4))
MACHINE = Machine(GPUS, 64, numa_nodes=NODES)
NAMES = ("agg-0", "agg-1", "agg-2", "agg-3")


def test_each_worker_gets_its_share_of_the_cores_of_its_gpus_node() -> None:
    placed = place_on_cores(MACHINE, NAMES, [(gpu,) for gpu in GPUS])
    assert [cpu_ranges(cpus) for cpus in placed.cpus] == ["0-7,32-39", "8-15,40-47", "16-23,48-55", "24-31,56-63"]
    assert placed.reasons[2] == ("agg-2 on CPUs 16-23,48-55 of NUMA node 1 of its GPU because of --worker-cores auto")


def test_workers_on_one_node_share_it_whatever_their_order() -> None:
    placed = place_on_cores(MACHINE, NAMES[:3], [(GPUS[2],), (GPUS[0],), (GPUS[3],)])
    assert [cpu_ranges(cpus) for cpus in placed.cpus] == ["16-23,48-55", "0-15,32-47", "24-31,56-63"]


def test_without_gpus_the_nodes_take_turns() -> None:
    placed = place_on_cores(replace(MACHINE, gpus=()), NAMES[:2], [(), ()])
    assert [cpu_ranges(cpus) for cpus in placed.cpus] == ["0-15,32-47", "16-31,48-63"]


def test_they_stay_on_all_cores_where_placing_them_would_not_help() -> None:
    one = Machine((), 16, numa_nodes=NODES[:1])
    cases = {
        "because the cgroup limits the CPU time": (replace(MACHINE, cores_taken="the cgroup limits the CPU time"), 4),
        "because this machine has one NUMA node and one worker": (one, 1),
        "because the cores of this machine are not known": (Machine(()), 2),
        "because a worker would have 3 cores of its NUMA node, and needs 4": (one, 5),
    }
    for because, (machine, count) in cases.items():
        placed = place_on_cores(machine, [f"agg-{number}" for number in range(count)], [()] * count)
        assert placed.cpus == ((),) * count
        assert placed.reasons == (f"--worker-cores auto leaves workers on all cores, {because}",)
