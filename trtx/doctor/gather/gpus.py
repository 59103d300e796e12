"""Reads the driver and the visible GPUs from NVML."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pynvml

from trtx.doctor.gather.nvml import GpuProcess, gpu_state
from trtx.launch import probe
from trtx.nvml import ClockReason, ask, watts
from trtx.topology import Gpu as SeenGpu
from trtx.topology import Machine

ComputeMode = Literal["default", "exclusive process", "prohibited"]
Mig = Literal["off", "on", "slice"]  # slice: the device is a part of a GPU

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA_VENDOR = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers
_RECOVERIES = {
    pynvml.NVML_GPU_RECOVERY_ACTION_NONE: "none",
    pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: "a reset of the GPU",
    pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: "a reboot of the machine",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: "an end of all peer traffic",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: "an end of all work and a reset of the GPU",
}
_COMPUTE_MODES: dict[int, ComputeMode] = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: "default",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive process",
    pynvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
}
_PATHS = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "PIX",
    pynvml.NVML_TOPOLOGY_SINGLE: "PIX",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
    pynvml.NVML_TOPOLOGY_NODE: "NODE",
    pynvml.NVML_TOPOLOGY_SYSTEM: "SYS",
}
_P2P_READ = 0  # NVML_P2P_CAPS_INDEX_READ, which nvidia-ml-py 13 defines as a tuple by a stray comma


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One visible GPU. None: NVML does not report the value, as on MIG slices and some desktop GPUs."""

    index: int
    name: str
    memory_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int] | None = None
    processes: tuple[GpuProcess, ...] = ()
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    application_sm_clock_mhz: int | None = None  # the configured application clock
    clock_reasons: tuple[ClockReason, ...] = ()
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    uncorrected_ecc_errors: int | None = None  # since the driver was loaded
    remap_pending: bool | None = None  # memory rows will be remapped at the next reset
    remap_failed: bool | None = None
    recovery: str | None = None  # the action that NVML requests after an Xid, or "none"
    persistence: bool | None = None
    compute_mode: ComputeMode | None = None
    mig: Mig = "off"
    nvlinks_up: int = 0
    fabric_ready: bool | None = None  # None: not behind an NVSwitch
    uuid: str | None = None  # in the form that CUDA_VISIBLE_DEVICES accepts


@dataclass(frozen=True, slots=True)
class GpuPair:
    """The connection between two visible GPUs."""

    first: int
    second: int
    nvlink: bool
    peer_access: bool | None
    path: str  # the name in `nvidia-smi topo -m`: PIX, PXB, PHB, NODE, SYS


@dataclass(frozen=True, slots=True)
class Gpus:
    """The driver and its GPUs. ``problem``: NVML's error message if it did not answer."""

    problem: str | None = None
    driver: str | None = None
    cuda: tuple[int, int] | None = None  # the highest CUDA release that the driver, or a compat package, supports
    installed: int = 0  # GPUs that NVML counts, visible or not; without NVML, those on the PCI bus
    visible: tuple[GpuFacts, ...] = ()
    pairs: tuple[GpuPair, ...] = ()


def gather_gpus() -> Gpus:
    """Returns the driver, the GPUs in ``CUDA_VISIBLE_DEVICES`` in its order, and the connection of each pair."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Gpus(problem=str(error), installed=_nvidia_devices_on_the_bus())
    try:
        return _gpus(probe())
    finally:
        pynvml.nvmlShutdown()


def _gpus(machine: Machine) -> Gpus:
    handles = [pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in machine.gpus]
    cuda = ask(pynvml.nvmlSystemGetCudaDriverVersion)
    return Gpus(
        driver=ask(lambda: str(pynvml.nvmlSystemGetDriverVersion())),
        cuda=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
        installed=ask(pynvml.nvmlDeviceGetCount) or 0,
        visible=tuple(_gpu(gpu, handle) for gpu, handle in zip(machine.gpus, handles, strict=True)),
        pairs=tuple(
            GpuPair(
                first,
                second,
                nvlink=second in machine.gpus[first].nvlink_peers,
                peer_access=_peer_access(handles[first], handles[second]),
                path=_path(handles[first], handles[second]),
            )
            for first, second in itertools.combinations(range(len(handles)), 2)
        ),
    )


def _gpu(seen: SeenGpu, handle: Any) -> GpuFacts:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    state = gpu_state(handle)
    remapped = ask(lambda: pynvml.nvmlDeviceGetRemappedRows(handle))
    return GpuFacts(
        index=seen.index,
        name=seen.name,
        uuid=seen.uuid,
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
        compute_capability=ask(lambda: pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
        processes=state.processes or (),
        sm_clock_mhz=state.sm_clock_mhz,
        max_sm_clock_mhz=state.max_sm_clock_mhz,
        application_sm_clock_mhz=ask(lambda: pynvml.nvmlDeviceGetApplicationsClock(handle, pynvml.NVML_CLOCK_SM)),
        clock_reasons=state.clock_reasons or (),
        power_limit_w=watts(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)),
        default_power_limit_w=watts(lambda: pynvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)),
        uncorrected_ecc_errors=ask(
            lambda: pynvml.nvmlDeviceGetTotalEccErrors(
                handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
            )
        ),
        remap_pending=None if remapped is None else bool(remapped[2]),
        remap_failed=None if remapped is None else bool(remapped[3]),
        recovery=_recovery(handle),
        persistence=ask(lambda: bool(pynvml.nvmlDeviceGetPersistenceMode(handle))),
        compute_mode=_compute_mode(handle),
        mig=_mig(handle),
        nvlinks_up=_nvlinks_up(handle),
        fabric_ready=_fabric_ready(handle),
    )


def _recovery(handle: Any) -> str | None:
    values = ask(lambda: pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]))
    if values is None or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    return _RECOVERIES.get(values[0].value.uiVal, "a recovery that `nvidia-smi -q` names")


def _compute_mode(handle: Any) -> ComputeMode | None:
    mode = ask(lambda: int(pynvml.nvmlDeviceGetComputeMode(handle)))
    return None if mode is None else _COMPUTE_MODES.get(mode)


def _mig(handle: Any) -> Mig:
    if ask(lambda: bool(pynvml.nvmlDeviceIsMigDeviceHandle(handle))):
        return "slice"
    modes = ask(lambda: pynvml.nvmlDeviceGetMigMode(handle))
    return "on" if modes is not None and modes[0] == pynvml.NVML_DEVICE_MIG_ENABLE else "off"


def _nvlinks_up(handle: Any) -> int:
    def state(link: int) -> int | None:
        return ask(lambda: pynvml.nvmlDeviceGetNvLinkState(handle, link))

    return sum(state(link) == pynvml.NVML_FEATURE_ENABLED for link in range(pynvml.NVML_NVLINK_MAX_LINKS))


def _fabric_ready(handle: Any) -> bool | None:
    info = pynvml.c_nvmlGpuFabricInfo_t()
    if ask(lambda: pynvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))) is None:
        return None
    if info.state == pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        return None
    return bool(info.state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED)


def _peer_access(first: Any, second: Any) -> bool | None:
    status = ask(lambda: pynvml.nvmlDeviceGetP2PStatus(first, second, _P2P_READ))
    return None if status is None else bool(status == pynvml.NVML_P2P_STATUS_OK)


def _path(first: Any, second: Any) -> str:
    level = ask(lambda: pynvml.nvmlDeviceGetTopologyCommonAncestor(first, second))
    return _PATHS.get(level, "PCIe") if level is not None else "PCIe"


def _nvidia_devices_on_the_bus() -> int:
    """Counts the NVIDIA GPUs on the PCI bus, if no driver answers. A container may see GPUs assigned to others."""

    def read(device: Path, name: str) -> str:
        try:
            return (device / name).read_text().strip()
        except OSError:
            return ""

    devices = sorted(_PCI_DEVICES.iterdir()) if _PCI_DEVICES.is_dir() else []
    return sum(
        read(device, "vendor") == _NVIDIA_VENDOR and read(device, "class").startswith(_DISPLAY_CLASSES)
        for device in devices
    )
