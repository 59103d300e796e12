"""Reads this machine's GPUs, through NVML and within the caller's ``CUDA_VISIBLE_DEVICES``, and its CPU cores."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pynvml

from trtx.launch.cores import cores_taken, cpu_cores, numa_node_of, numa_nodes
from trtx.topology import Gpu, Machine


def probe() -> Machine:
    """The GPUs and cores that the caller may use.

    Without a GPU or a driver, there are no GPUs. Does not import torch.
    """
    with _nvml() as there:
        handles = _visible_handles(os.environ.get("CUDA_VISIBLE_DEVICES")) if there else []
        gpus = tuple(_gpu(index, handles) for index in range(len(handles)))
    return Machine(gpus, cpu_cores(), numa_nodes(), cores_taken())


@contextlib.contextmanager
def _nvml() -> Iterator[bool]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def _visible_handles(visible: str | None) -> list[Any]:
    """Device handles in CUDA's visible order. Like CUDA, stops at the first entry that matches no device.

    Entries are indices (in PCI bus order, which CUDA uses too on machines with equal GPUs), or UUIDs or their prefixes.
    """
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    if visible is None:
        return handles
    uuids = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    chosen: list[Any] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdigit() and int(entry) < len(handles):
            chosen.append(handles[int(entry)])
        elif entry.startswith("MIG-"):
            try:
                chosen.append(pynvml.nvmlDeviceGetHandleByUUID(entry))
            except pynvml.NVMLError:
                break
        elif entry.startswith("GPU-") and sum(uuid.startswith(entry) for uuid in uuids) == 1:
            chosen.append(next(handle for handle, uuid in zip(handles, uuids, strict=True) if uuid.startswith(entry)))
        else:
            break
    return chosen


def _gpu(index: int, handles: list[Any]) -> Gpu:
    handle = handles[index]
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        index=index,
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        name=str(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(memory.total),
        memory_free_bytes=int(memory.free),
        numa_node=_numa_node(handle),
        nvlink_peers=tuple(
            peer for peer, other in enumerate(handles) if peer != index and _joined_by_nvlink(handle, other)
        ),
    )


def _numa_node(handle: Any) -> int | None:
    try:
        bus_id = pynvml.nvmlDeviceGetPciInfo(handle).busId
    except pynvml.NVMLError:
        return None
    return numa_node_of(bus_id.decode() if isinstance(bus_id, bytes) else bus_id)


def _joined_by_nvlink(first: Any, second: Any) -> bool:
    """Whether two GPUs are connected by NVLink, also through an NVSwitch, where the links' remote end is the switch."""
    try:
        status = pynvml.nvmlDeviceGetP2PStatus(first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except pynvml.NVMLError:
        return False
    return bool(status == pynvml.NVML_P2P_STATUS_OK)
