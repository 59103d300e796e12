"""The doctor's questions: to NVML as a script answers it, and to this machine's own kernel and packages."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from doctor_machines import script_kernel
from packaging.utils import canonicalize_name
from scripted_nvml import GIB, H100S, refuses, script_two_gpus
from topology_clients import wait_until

from trtx.doctor.facts import GpuState, Package, System, Topology
from trtx.doctor.gather import gather_gpus, gather_software, gather_system, gather_topologies, open_gpus, system
from trtx.launch.guardian import Guardian

pytestmark = pytest.mark.slow


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    script_two_gpus(monkeypatch)
    return monkeypatch


def test_gpus_are_told_as_nvml_tells_them(two_gpus: pytest.MonkeyPatch) -> None:
    gpus = gather_gpus()
    assert (gpus.problem, gpus.driver, gpus.cuda, gpus.installed) == (None, "580.95.05", (13, 0), 2)
    first, second = gpus.visible
    assert (first.name, first.memory_bytes, first.free_bytes) == ("NVIDIA H100 80GB HBM3", 80 * GIB, 79 * GIB)
    assert (first.compute_capability, first.sm_clock_mhz, first.max_sm_clock_mhz) == ((9, 0), 1200, 1980)
    assert (first.uuid, first.application_sm_clock_mhz) == (H100S[0], 1755)
    assert first.clock_reasons == ("power limit", "thermal, by software")
    assert second.clock_reasons == ("idle",)
    assert (first.power_limit_w, first.default_power_limit_w) == (350, 700)
    assert (first.uncorrected_ecc_errors, first.remap_pending, first.remap_failed) == (2, True, False)
    assert (first.recovery, first.persistence) == ("a reset of the GPU", False)
    assert (first.compute_mode, first.mig, first.nvlinks_up, first.fabric_ready) == (
        "exclusive process",
        "off",
        18,
        None,
    )
    (process,) = first.processes
    assert (process.pid, process.memory_bytes, process.is_ours) == (os.getpid(), GIB, False)
    assert process.name
    assert second.processes == ()
    (pair,) = gpus.pairs
    assert (pair.first, pair.second, pair.nvlink, pair.peer_access, pair.path) == (0, 1, True, True, "SYS")


def test_the_callers_visible_set_and_its_order_hold(two_gpus: pytest.MonkeyPatch) -> None:
    two_gpus.setenv("CUDA_VISIBLE_DEVICES", "1")
    gpus = gather_gpus()
    assert (gpus.installed, len(gpus.visible), gpus.pairs) == (2, 1, ())
    assert gpus.visible[0].clock_reasons == ("idle",)


def test_a_gpu_that_answers_only_the_basic_questions_is_told_as_far_as_it_goes(two_gpus: pytest.MonkeyPatch) -> None:
    basic = {"nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetCount"}
    for name in vars(pynvml).copy():
        if name.startswith("nvmlDeviceGet") and "Handle" not in name and name not in basic:
            two_gpus.setattr(pynvml, name, refuses)
    gpus = gather_gpus()
    assert [gpu.name for gpu in gpus.visible] == ["NVIDIA H100 80GB HBM3"] * 2
    assert gpus.visible[0].compute_mode is None and gpus.visible[0].mig == "off"
    assert gpus.pairs[0].peer_access is None and gpus.pairs[0].path == "PCIe"


def test_gpus_are_read_as_often_as_asked_while_they_work(two_gpus: pytest.MonkeyPatch) -> None:
    clocks = iter((1980, 1200))
    two_gpus.setattr(pynvml, "nvmlDeviceGetClockInfo", lambda handle, _: next(clocks) if handle == H100S[0] else 1755)
    with open_gpus(H100S) as read:
        assert read is not None
        readings = [read(), read()]
    assert [[gpu.sm_clock_mhz for gpu in gpus] for gpus in readings] == [[1980, 1755], [1200, 1755]]
    first, second = readings[1]
    assert (first.max_sm_clock_mhz, first.clock_reasons) == (1980, ("power limit", "thermal, by software"))
    assert (first.power_w, first.temperature_c, first.memory_used_bytes) == (345.5, 88, GIB)
    assert first.processes is not None
    assert [(one.pid, one.topology, one.sm_percent) for one in first.processes] == [(os.getpid(), None, 34)]
    assert second.processes == ()


def test_a_gpu_that_says_nothing_is_read_as_far_as_it_goes(two_gpus: pytest.MonkeyPatch) -> None:
    for name in vars(pynvml).copy():
        if name.startswith("nvmlDeviceGet") and "Handle" not in name:
            two_gpus.setattr(pynvml, name, refuses)
    with open_gpus(H100S) as read:
        assert read is not None
        assert read() == (GpuState(None, None, None, None, None, None, None),) * 2


def test_gpus_that_nvml_does_not_know_can_not_be_read(two_gpus: pytest.MonkeyPatch) -> None:
    two_gpus.setattr(pynvml, "nvmlDeviceGetHandleByUUID", refuses)
    with open_gpus(H100S) as read:
        assert read is None
    two_gpus.setattr(pynvml, "nvmlInit", refuses)
    with open_gpus(H100S) as read:
        assert read is None


def test_a_process_is_known_by_its_topology(two_gpus: pytest.MonkeyPatch) -> None:
    argv = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, env={**os.environ, "TRTX_TOPOLOGY": "trtx-a"}) as worker:
        entries = [SimpleNamespace(pid=pid, usedGpuMemory=GIB) for pid in (worker.pid, os.getpid(), 2**22 + 1)]
        two_gpus.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: entries)
        # Until it runs Python, it is a copy of this process.
        wait_until(
            lambda: "TRTX_TOPOLOGY=trtx-a" in Path(f"/proc/{worker.pid}/environ").read_text(),
            seconds=20,
            what="the process has its own environment",
        )
        processes = gather_gpus().visible[0].processes
        worker.communicate()
    assert [one.topology for one in processes] == ["trtx-a", None, None]
    assert [one.is_ours for one in processes] == [True, False, False]
    assert [one.name is None for one in processes] == [False, False, True]


def test_an_nvml_that_does_not_answer_leaves_its_own_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    gpus = gather_gpus()
    assert gpus.problem is not None and "ersion" in gpus.problem
    assert gpus.visible == ()


def test_packages_are_read_without_importing_them() -> None:
    program = (
        "import sys; from trtx.doctor.gather import gather_software; found = gather_software()\n"
        "assert found.packages['ai-dynamo'].version == '1.6.1', found.packages['ai-dynamo']\n"
        "assert any('aiperf' in text for text in found.packages['trtx'].requires)\n"
        "slow = {'torch', 'tensorrt_llm', 'nixl', 'transformers', 'modelopt', 'lm_eval'}\n"
        "sys.exit(repr(sorted(slow & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "[]"


def test_the_codecs_of_pyavs_wheel_are_those_that_its_folder_of_libraries_holds() -> None:
    import av

    libraries = (Path(av.__file__).parents[1] / "av.libs").glob("libx26[45]*")
    assert gather_software().gpl_codecs == tuple(sorted(path.name[3:7] for path in libraries))


def test_a_package_is_described_as_importlib_describes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, file, text in (
        ("readme-1.dist-info", "METADATA", "Name: A_Readme\nVersion: 1\nRequires-Dist: b>=2\n\nVersion: 2\n"),
        ("folded-1.dist-info", "METADATA", "name: folded\nVERSION:1\nRequires-Dist: b>=2;\n python_version>'3'\n"),
        ("older-1.egg-info", "PKG-INFO", "Name: older\nVersion: 1\n"),
        ("older-1.egg-info", "requires.txt", "b>=2\n"),
        ("broken-1.dist-info", "METADATA", "Version: 1\n"),
    ):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / file).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    wanted: dict[str, Package] = {}
    for one in metadata.distributions():
        if name := one.metadata["Name"]:
            wanted.setdefault(canonicalize_name(name), Package(one.version, tuple(one.requires or ())))
    found = gather_software().packages
    assert {"a-readme", "folded", "older", "trtx"} <= found.keys()
    assert {name: found[name] for name in wanted} == wanted and found.keys() <= {*wanted, "tensorrt-llm"}


def test_a_package_without_metadata_is_found_by_its_version_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "tensorrt_llm"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('never imported')\n")
    (package / "version.py").write_text('"""Words."""\n__version__ = "1.3.0rc22+cpu"\n')
    monkeypatch.syspath_prepend(tmp_path)
    assert gather_software().packages["tensorrt-llm"].version == "1.3.0rc22+cpu"


def test_a_taken_port_names_who_has_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        problem = gather_system(taken.getsockname()[1], tmp_path).port_problem
    assert problem is not None and f"pid {os.getpid()}" in problem


def test_a_machine_is_told_as_its_kernel_tells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = script_kernel(tmp_path, monkeypatch)
    found = gather_system(0, tmp_path / "runs")
    for fact in dataclasses.fields(System):
        told, is_so = getattr(found, fact.name), getattr(expected, fact.name)
        assert told == is_so, (
            f"trtx/doctor/gather/system.py reports {fact.name} as {told}, and script_kernel in "
            f"tests/unit/doctor/doctor_machines.py makes the kernel answer {is_so}: correct one of them"
        )


def test_what_a_kernel_does_not_say_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script_kernel(tmp_path, monkeypatch)
    (tmp_path / "instances").unlink()
    (tmp_path / "range").write_text("\n")
    monkeypatch.setattr(system, "_SHM", tmp_path / "nowhere")
    found = gather_system(0, tmp_path)
    assert (found.inotify_limit, found.ephemeral_first, found.shm_bytes) == (None, None, None), (
        "what is not known is None, never 0: trtx/doctor/gather/system.py"
    )


def test_no_fact_of_a_machine_is_left_to_a_default() -> None:
    silent = [fact.name for fact in dataclasses.fields(System) if fact.default is not dataclasses.MISSING]
    assert not silent, (
        f"{', '.join(silent)} of System has a default, as if it were known of any machine: remove it, and "
        "read the fact in gather_system: trtx/doctor/gather/system.py"
    )


def test_a_run_directory_that_does_not_exist_yet_is_judged_by_the_one_above_it(tmp_path: Path) -> None:
    (runs, *_) = gather_system(0, tmp_path / "not" / "yet").directories
    assert (runs.path, runs.problem) == (tmp_path, None)
    assert runs.free_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_takes_no_file_says_why() -> None:
    (runs, *_) = gather_system(0, Path("/proc/runs")).directories  # whoever asks, the kernel makes no file there
    assert runs.problem


@pytest.fixture
def sleeper(tmp_path: Path) -> Any:
    """A process of the topology trtx-0123abcd, and its scratch directory."""
    scratch = tmp_path / "trtx-0123abcd"
    scratch.mkdir()
    os.utime(scratch, (0, 0))
    process = subprocess.Popen(["sleep", "600"], env={"TRTX_TOPOLOGY": scratch.name})
    # Until it has become sleep, it is a copy of this process with this process's environment.
    wait_until(lambda: _found(tmp_path) is not None and _found(tmp_path).pids == (process.pid,), 10, "sleep runs")
    yield process
    process.send_signal(signal.SIGKILL)
    process.wait()


def _found(temporary: Path) -> Any:
    return next((one for one in gather_topologies(temporary) if one.name == "trtx-0123abcd"), None)


def test_a_process_whose_guardian_is_gone_is_told_apart_from_a_guarded_one(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    scratch = tmp_path / "trtx-0123abcd"
    assert _found(tmp_path) == Topology("trtx-0123abcd", (sleeper.pid,), is_guarded=False, scratch=scratch)
    guardian = Guardian("TRTX_TOPOLOGY=trtx-0123abcd", scratch)
    wait_until(lambda: _found(tmp_path).is_guarded, 10, "its guardian is seen")
    guardian.goodbye()
    assert not _found(tmp_path).is_guarded


def test_scratch_directories_count_once_they_have_settled(tmp_path: Path) -> None:
    for name in ("trtx-deadbeef", "trtx-aiperf-a1b2c3d4", "trtx-notes", "other"):
        (tmp_path / name).mkdir()
    assert [one for one in gather_topologies(tmp_path) if one.scratch] == []
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    names = [one.name for one in gather_topologies(tmp_path) if one.scratch]
    assert names == ["trtx-aiperf-a1b2c3d4", "trtx-deadbeef"]
