"""An NVML that answers as a script says, for tests of what asks it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

GIB = 2**30
H100S = ("GPU-aaaa", "GPU-bbbb")


def refuses(*_: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def script_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """An NVML with two H100s on one NVLink; the first runs this process, hot. A handle is the UUID."""

    def answers(**script: Any) -> None:
        for name, answer in script.items():
            monkeypatch.setattr(pynvml, f"nvml{name}", answer if callable(answer) else lambda *_, a=answer: a)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    answers(
        Init=None,
        Shutdown=None,
        SystemGetDriverVersion="580.95.05",
        SystemGetCudaDriverVersion=13000,
        DeviceGetCount=2,
        DeviceGetHandleByIndex=lambda index: H100S[index],
        DeviceGetHandleByUUID=lambda uuid: uuid,
        DeviceGetUUID=lambda handle: handle,
        DeviceGetName="NVIDIA H100 80GB HBM3",
        DeviceGetMemoryInfo=SimpleNamespace(total=80 * GIB, free=79 * GIB, used=GIB),
        DeviceGetCudaComputeCapability=(9, 0),
        DeviceGetComputeRunningProcesses=lambda handle: (
            [SimpleNamespace(pid=os.getpid(), usedGpuMemory=GIB)] if handle == H100S[0] else []
        ),
        DeviceGetClockInfo=1200,
        DeviceGetMaxClockInfo=1980,
        DeviceGetApplicationsClock=1755,
        DeviceGetCurrentClocksEventReasons=lambda handle: 0x24 if handle == H100S[0] else 0x1,
        DeviceGetPowerUsage=345_500,
        DeviceGetTemperature=88,
        DeviceGetProcessUtilization=lambda handle, since: (
            [SimpleNamespace(pid=os.getpid(), smUtil=share) for share in (12, 34, 7)]
            if handle == H100S[0]
            else refuses()
        ),
        DeviceGetEnforcedPowerLimit=350_000,
        DeviceGetPowerManagementDefaultLimit=700_000,
        DeviceGetTotalEccErrors=2,
        DeviceGetRemappedRows=(0, 1, 1, 0),
        DeviceGetFieldValues=[SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=1))],
        DeviceGetPersistenceMode=0,
        DeviceGetComputeMode=pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
        DeviceIsMigDeviceHandle=0,
        DeviceGetMigMode=[0, 0],
        DeviceGetNvLinkState=lambda handle, link: 1 if link < 18 else refuses(),
        DeviceGetGpuFabricInfo=refuses,
        DeviceGetP2PStatus=pynvml.NVML_P2P_STATUS_OK,
        DeviceGetTopologyCommonAncestor=pynvml.NVML_TOPOLOGY_SYSTEM,
    )
