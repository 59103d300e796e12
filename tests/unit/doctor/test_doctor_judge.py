"""The doctor's judgements, on machines that are described rather than had."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doctor_hosts import HOSTS, hosts
from doctor_machines import GIB, SYSTEM, h100_box, laptop, rows, with_packages, with_system

from trtx.doctor.facts import Directory, Facts, GpuFacts, GpuProcess, Gpus, Package, Topology


def amiss(facts: Facts) -> dict[str, str]:
    return {name: check.status for name, check in rows(facts).items() if check.status in ("warning", "failed")}


@pytest.mark.parametrize("facts", [h100_box(), h100_box(8), laptop()], ids=["one H100", "eight H100", "laptop"])
def test_nothing_is_amiss_on_a_good_machine(facts: Facts) -> None:
    assert amiss(facts) == {}


def test_a_laptop_is_told_that_the_torch_engine_runs_on_its_cpu() -> None:
    row = rows(laptop())["GPU"]
    assert (row.status, row.seen) == ("absent", "no GPU: the torch engine runs on the CPU")
    assert rows(laptop())["tensorrt_llm"].status == "absent"


def test_tensorrt_llm_asked_for_where_neither_it_nor_a_gpu_is_there_fails() -> None:
    facts = replace(laptop(), engine_asked="tensorrt-llm", engine="tensorrt-llm")
    assert amiss(facts) == {"engine": "failed", "tensorrt_llm": "failed", "GPU": "failed"}
    assert "trtx[tensorrt-llm]" in rows(facts)["tensorrt_llm"].fix


def test_a_stand_in_of_tensorrt_llm_needs_no_gpu_and_no_mpi() -> None:
    facts = replace(with_packages(laptop(), tensorrt_llm="1.3.0rc22+cpu"), engine="tensorrt-llm")
    assert amiss(facts) == {}
    assert "MPI" not in rows(facts)


def test_a_driver_too_old_for_torchs_cuda_is_named_with_the_branch_that_it_takes() -> None:
    facts = h100_box()
    old = replace(facts, gpus=replace(facts.gpus, driver="570.86.15", cuda=(12, 8)))
    row = rows(old)["driver"]
    assert row.status == "failed"
    assert "570.86.15" in row.seen and "CUDA 13.0" in row.seen
    assert "580" in row.expected and "580" in row.fix


def test_an_old_driver_with_a_compatibility_package_will_do() -> None:
    facts = h100_box()
    assert amiss(replace(facts, gpus=replace(facts.gpus, driver="570.86.15", cuda=(13, 0)))) == {}


def test_a_torch_without_cuda_beside_a_gpu_fails() -> None:
    facts = with_packages(h100_box(), torch="2.13.0+cpu")
    facts = replace(facts, software=replace(facts.software, torch_cuda=None))
    assert amiss(facts) == {"driver": "failed"}
    fix = rows(facts)["driver"].fix
    assert "torch 2.13.0 in its build with CUDA" in fix and "://" not in fix


def test_gpus_on_the_bus_without_a_driver_are_a_warning_for_torch_and_a_failure_for_tensorrt_llm() -> None:
    facts = replace(laptop(), gpus=Gpus(problem="Driver Not Loaded", installed=2))
    assert amiss(facts) == {"driver": "warning"}
    assert "--gpus all" in rows(facts)["driver"].fix
    facts = replace(with_packages(facts, tensorrt_llm="1.3.0rc22", mpi4py="4.0.1"), engine="tensorrt-llm")
    assert rows(facts)["driver"].status == "failed"


def test_gpus_that_the_caller_hides_are_no_fault_of_the_machine() -> None:
    facts = replace(laptop(), gpus=Gpus(driver="580.95.05", installed=8), environment={"CUDA_VISIBLE_DEVICES": ""})
    assert amiss(facts) == {}
    assert "hides all 8 GPUs" in rows(facts)["GPU"].seen


@pytest.mark.parametrize(
    ("changes", "name", "status", "words"),
    [
        ({"clock_reasons": ("power limit",)}, "GPU 0 clocks", "warning", "345 of 1980 MHz now: power limit"),
        ({"clock_reasons": ("thermal, by hardware",)}, "GPU 0 clocks", "warning", "thermal, by hardware"),
        ({"power_limit_w": 350.0}, "GPU 0 power limit", "warning", "350 W of 700 W"),
        ({"recovery": "a reset of the GPU"}, "GPU 0 recovery", "failed", "a reset of the GPU"),
        ({"remap_failed": True}, "GPU 0 memory rows", "failed", "could not be remapped"),
        ({"remap_pending": True}, "GPU 0 memory rows", "warning", "waits to be remapped"),
        ({"uncorrected_ecc_errors": 3}, "GPU 0 ECC", "warning", "3 uncorrected errors"),
        ({"persistence": False}, "GPU 0 persistence", "warning", "off"),
        ({"mig": "on"}, "GPU 0 MIG", "failed", "sees only slices"),
        ({"compute_mode": "prohibited"}, "GPU 0 compute mode", "failed", "prohibited"),
        ({"compute_mode": "exclusive process"}, "GPU 0 compute mode", "warning", "exclusive process"),
        ({"compute_capability": (7, 5)}, "GPU 0 architecture", "failed", "sm75"),
        ({"fabric_ready": False}, "NVLink fabric", "warning", "802"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_amiss_with_a_gpu_has_a_row(changes: dict[str, Any], name: str, status: str, words: str) -> None:
    facts = h100_box(**changes)
    assert amiss(facts) == {name: status}
    assert words in rows(facts)[name].seen


def test_a_gpu_that_tells_little_is_no_fault() -> None:
    bare = GpuFacts(0, "NVIDIA GeForce RTX 4090", 24 * GIB, 23 * GIB, compute_capability=(8, 9))
    facts = h100_box()
    facts = replace(facts, gpus=replace(facts.gpus, visible=(bare,), pairs=()))
    assert amiss(facts) == {}
    assert rows(facts)["GPU 0"].seen == "NVIDIA GeForce RTX 4090, sm89, 23.0 of 24.0 GiB free"


def test_two_reasons_for_low_clocks_share_a_row() -> None:
    seen = rows(h100_box(clock_reasons=("power limit", "thermal, by software")))["GPU 0 clocks"].seen
    assert "power limit" in seen and "thermal, by software" in seen


@pytest.mark.parametrize(("free_gib", "status"), [(59, "warning"), (3, "failed")])
def test_a_foreign_process_on_a_gpu_is_named_and_fails_when_it_leaves_no_room(free_gib: int, status: str) -> None:
    process = GpuProcess(4711, "python", (79 - free_gib) * GIB)
    row = rows(h100_box(processes=(process,), free_bytes=free_gib * GIB))["GPU 0 memory"]
    assert row.status == status
    assert f"python (pid 4711) holds {79 - free_gib}.0 GiB; {free_gib}.0 GiB are free" in row.seen


def test_memory_held_by_another_container_is_seen_although_its_process_is_not() -> None:
    assert (
        "a process that this container can't see holds 60.0 GiB"
        in rows(h100_box(free_bytes=20 * GIB))["GPU 0 memory"].seen
    )


def test_trtxs_own_workers_on_a_gpu_are_no_foreigners() -> None:
    worker = GpuProcess(4711, "python", 40 * GIB, topology="trtx-a")
    assert amiss(h100_box(processes=(worker,), free_bytes=39 * GIB)) == {}


def test_gpus_joined_by_pcie_alone_are_a_warning_that_names_the_pairs() -> None:
    row = rows(h100_box(2, nvlink=False))["links"]
    assert row.status == "warning"
    assert "0-1 (SYS)" in row.seen and "NCCL_P2P_DISABLE=1" in row.fix
    assert "NVLink joins all 8 GPUs, 18 links each" in rows(h100_box(8))["links"].seen


def test_a_gpu_with_fewer_links_than_its_peers_is_named() -> None:
    assert rows(h100_box(8, nvlinks_up=12))["NVLink links"].seen == "GPU 0: 12 up, others 18"


def test_nccl_without_peer_access_on_an_nvlink_machine_is_a_warning() -> None:
    assert amiss(replace(h100_box(2), environment={"NCCL_P2P_DISABLE": "1"})) == {"NCCL_P2P_DISABLE": "warning"}


def test_a_package_outside_the_range_of_trtx_fails_with_the_pip_line() -> None:
    row = rows(with_packages(h100_box(), torch="2.10.0+cu130"))["torch"]
    assert row.status == "failed"
    assert "torch is 2.10.0+cu130, and trtx wants <2.14,>=2.11" in row.seen
    assert row.fix == "pip install 'torch<2.14,>=2.11'"


def test_dynamo_and_its_runtime_must_agree() -> None:
    row = rows(with_packages(h100_box(), ai_dynamo_runtime="1.4.1"))["ai-dynamo"]
    assert row.status == "failed" and "1.4.1" in row.seen and "ai-dynamo-runtime==1.6.1" in row.fix


def test_dynamo_is_installed_without_the_simulator_that_it_requires() -> None:
    row = rows(with_packages(h100_box(), ai_dynamo=None))["ai-dynamo"]
    assert row.status == "failed" and row.fix == "pip install --no-deps 'ai-dynamo==1.6.1'"
    assert amiss(with_packages(h100_box(), aisimulate="0.12.0")) == {"other packages": "failed"}


def test_nixls_wheels_must_agree_and_fit_torchs_cuda() -> None:
    row = rows(with_packages(h100_box(), nixl=Package("1.5.1"), nixl_cu12="1.4.0"))["nixl"]
    assert row.status == "failed" and "nixl-cu12 1.4.0" in row.seen
    row = rows(with_packages(h100_box(), nixl=Package("1.5.1"), nixl_cu13=None))["nixl"]
    assert row.status == "failed" and "pip install nixl-cu13==1.5.1" in row.fix


def test_one_backend_of_nixl_is_enough_where_it_is_the_one_of_torchs_cuda() -> None:
    assert rows(with_packages(h100_box(), nixl_cu12=None))["nixl"].status == "ok"


def test_the_torch_that_tensorrt_llm_was_built_against_must_hold_and_its_other_pins_are_warnings() -> None:
    engine = Package("1.3.0rc22", ("torch==2.11.0", "numpy<2.4"))
    facts = replace(
        with_packages(h100_box(), tensorrt_llm=engine, numpy="2.5.0", mpi4py="4.0.1"), engine="tensorrt-llm"
    )
    facts = replace(facts, software=replace(facts.software, open_mpi="4.1.6"))
    assert amiss(facts) == {"other packages": "warning"}
    assert amiss(with_packages(facts, torch="2.13.0+cu130")) == {"other packages": "warning", "torch": "failed"}


def test_a_tensorrt_llm_that_dynamo_was_not_built_against_is_a_warning() -> None:
    facts = replace(with_packages(h100_box(), tensorrt_llm="1.2.1", mpi4py="4.0.1"), engine="tensorrt-llm")
    facts = replace(facts, software=replace(facts.software, open_mpi="4.1.6"))
    assert amiss(facts) == {"tensorrt_llm": "warning"}
    assert "==1.3.0rc22" in rows(facts)["tensorrt_llm"].expected
    assert rows(with_packages(facts, tensorrt_llm="1.1.0"))["tensorrt_llm"].status == "failed"


@pytest.mark.parametrize(
    ("open_mpi", "mpi4py", "status"),
    [("5.0.7", "3.1.5", "warning"), ("5.0.7", "4.1.0", "ok"), (None, "4.1.0", "warning")],
)
def test_open_mpi_5_wants_mpi4py_4(open_mpi: str | None, mpi4py: str, status: str) -> None:
    facts = with_packages(h100_box(), tensorrt_llm="1.3.0rc22", mpi4py=mpi4py)
    facts = replace(facts, engine="tensorrt-llm", software=replace(facts.software, open_mpi=open_mpi))
    assert rows(facts)["MPI"].status == status


def test_a_python_outside_the_range_fails() -> None:
    facts = h100_box()
    assert amiss(replace(facts, software=replace(facts.software, python="3.13.1"))) == {"python": "failed"}


def test_trtx_from_its_sources_says_that_versions_are_not_checked() -> None:
    assert rows(with_packages(h100_box(), trtx=None))["trtx"].status == "warning"


def test_a_modelopt_outside_the_range_is_a_warning() -> None:
    trtx = Package("0.1.0", ('nvidia-modelopt<0.48,>=0.47; extra == "quantize"',))
    assert rows(with_packages(h100_box(), trtx=trtx, nvidia_modelopt="0.47.0"))["modelopt"].status == "ok"
    assert rows(with_packages(h100_box(), trtx=trtx, nvidia_modelopt="0.46.0"))["modelopt"].status == "warning"


def test_lm_eval_is_told_with_its_version_and_its_absence_with_the_extra() -> None:
    trtx = Package("0.1.0", ('jsonschema>=9; extra == "eval"', 'lm-eval[ifeval]==0.4.13; extra == "eval"'))
    found = [rows(with_packages(h100_box(), trtx=trtx, lm_eval=one))["lm-eval"] for one in ("0.4.13", "0.4.10", None)]
    assert [row.status for row in found] == ["ok", "warning", "absent"]
    assert found[0].seen == "0.4.13" and found[1].fix == "pip install 'lm-eval==0.4.13'"
    assert "pip install 'trtx[eval]'" in found[2].seen


@pytest.mark.parametrize(
    ("limit", "hard", "status", "fix"),
    [
        (1024, 4096, "warning", "ulimit -n 4096"),
        (1024, 1024, "warning", "raise the hard limit, now 1024"),
        (128, 4096, "failed", "ulimit -n"),
    ],
)
def test_a_low_limit_of_open_files_is_told_in_streams(limit: int, hard: int, status: str, fix: str) -> None:
    row = rows(with_system(open_files=limit, open_files_hard=hard))["open files"]
    assert row.status == status and row.fix.startswith(fix)
    assert f"about {(limit - 64) // 2} streams" in row.seen


def test_no_limit_of_open_files_is_fine() -> None:
    assert rows(with_system(open_files=sys.maxsize))["open files"].seen == "no limit"


def test_dockers_shared_memory_fails_several_gpus_of_tensorrt_llm_and_warns_others() -> None:
    docker = replace(SYSTEM, shm_bytes=64 * 2**20)
    assert amiss(replace(h100_box(), system=docker)) == {"/dev/shm": "warning"}
    facts = with_packages(h100_box(2), tensorrt_llm="1.3.0rc22", mpi4py="4.0.1")
    facts = replace(facts, engine="tensorrt-llm", system=docker)
    assert rows(facts)["/dev/shm"].status == "failed"
    assert "--shm-size" in rows(facts)["/dev/shm"].fix


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"cpu_cores": 2}, {"CPU cores": "warning"}),
        ({"load_average": 12.0}, {"CPU cores": "warning"}),
        ({"memory_available_bytes": 2 * GIB}, {"memory": "warning"}),
        ({"memory_available_bytes": GIB // 2}, {"memory": "failed"}),
        ({"memory_left_bytes": GIB // 2}, {"memory": "failed"}),
        ({"ephemeral_first": 1024}, {"internal ports": "warning"}),
        ({"inotify_used": 126}, {"inotify": "failed"}),
        ({"inotify_used": 122}, {"inotify": "warning"}),
        ({"port_problem": "port 8000 on 127.0.0.1 is in use by x (pid 1); choose another"}, {"port 8000": "failed"}),
    ],
)
def test_what_is_amiss_with_the_system_has_a_row(changes: dict[str, Any], expected: dict[str, str]) -> None:
    assert amiss(with_system(**changes)) == expected


@pytest.mark.parametrize(
    ("directory", "status", "words"),
    [
        (Directory("discovery directory", Path("/tmp"), 0, "No space left on device"), "failed", "No space left"),
        (Directory("discovery directory", Path("/tmp"), GIB, "Read-only file system"), "failed", "Read-only"),
        (Directory("run directories", Path("/data"), GIB), "warning", "1.0 GiB free"),
        (Directory("checkpoint cache", Path("/data"), 10 * GIB), "warning", "10.0 GiB free"),
    ],
)
def test_a_directory_that_is_full_or_not_writable_has_a_row(directory: Directory, status: str, words: str) -> None:
    facts = with_system(directories=(directory,))
    assert amiss(facts) == {directory.name: status}
    assert words in rows(facts)[directory.name].seen


def test_processes_whose_launcher_is_gone_fail_and_stale_files_warn() -> None:
    topologies = (
        Topology("trtx-aaaaaaaa", (11, 12), is_guarded=True, scratch=Path("/tmp/trtx-aaaaaaaa")),
        Topology("trtx-bbbbbbbb", (21, 22), is_guarded=False),
        Topology("trtx-cccccccc", (), is_guarded=False, scratch=Path("/tmp/trtx-cccccccc")),
    )
    facts = replace(h100_box(), topologies=topologies)
    assert amiss(facts) == {"leftover processes": "failed", "leftover files": "warning"}
    assert rows(facts)["leftover processes"].fix == "kill -9 21 22"
    assert rows(facts)["leftover files"].fix == "rm -r /tmp/trtx-cccccccc"
    assert rows(facts)["running topologies"].seen == "trtx-aaaaaaaa (2 processes)"


def test_one_trtx_for_each_rank_of_mpirun_fails_and_variables_that_workers_do_not_get_are_fine() -> None:
    ranks = replace(h100_box(), environment={"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "0"})
    assert amiss(ranks) == {"MPI variables": "failed"}
    odd = replace(h100_box(), environment={"PMI_SIZE": "²", "PMIX_SIZE": "", "SLURM_STEP_NUM_TASKS": "many"})
    assert "failed" not in amiss(odd).values()  # what is no count is none of several ranks
    slurm = replace(h100_box(), environment={"SLURM_JOB_ID": "1", "PMI_RANK": "0"})
    assert rows(slurm)["MPI variables"].status == "ok"
    site = replace(h100_box(), environment={"OMPI_MCA_btl_vader_single_copy_mechanism": "none"})
    assert "MPI variables" not in rows(site)


def test_over_hosts_a_frontends_port_is_looked_at_on_its_planned_address_alone() -> None:
    taken = {"port_problem": "port 8000 on 127.0.0.1 is in use by x (pid 1); choose another"}
    alone = with_system(**taken)
    assert "port 8000" in rows(alone)
    assert "port 8000" not in rows(replace(alone, hosts=hosts()))


def test_of_files_of_credentials_those_that_others_can_read_are_told_with_the_mode_to_give_them() -> None:
    found = rows(replace(h100_box(), hosts=HOSTS["credentials here and there"]))
    assert (found["credentials"].status, found["credentials (2)"].status) == ("failed", "warning")
    assert found["credentials (2)"].fix == "chmod 600 /etc/trtx/key.pem"


def test_pyav_is_an_extra_whose_wheel_brings_codecs_under_the_gpl() -> None:
    trtx = Package("0.1.0", ('av<19,>=18; extra == "video"',))
    absent = rows(with_packages(h100_box(), trtx=trtx))["av"]
    assert absent.status == "absent" and "pip install 'trtx[video]'" in absent.seen
    assert rows(with_packages(h100_box(), trtx=trtx, av="17.1.0"))["av"].status == "warning"
    built_here = with_packages(h100_box(), trtx=trtx, av="18.1.0")
    assert rows(built_here)["av"].seen == "18.1.0"
    wheel = replace(built_here, software=replace(built_here.software, gpl_codecs=("x264", "x265")))
    assert rows(wheel)["av"].seen == "18.1.0; its wheel holds x264 and x265, under the GPL"
