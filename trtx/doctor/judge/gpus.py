"""Checks whether the GPUs are usable, which processes use them, and whether they run at full speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trtx.doctor.check import Check, absent, failed, ok, warning
from trtx.doctor.facts import ClockReason, Facts, GpuFacts, GpuProcess, Gpus

MINIMUM_DRIVERS = {11: 450, 12: 525, 13: 580}
"""CUDA major release → lowest driver branch. Source: NVIDIA, "CUDA Compatibility", Minor Version Compatibility,
table 1."""
LOWEST_CAPABILITY = (8, 0)
"""Ampere, where TensorRT-LLM's support matrix begins; the torch engine's kernels need bfloat16."""
LEAST_FREE = 0.1
"""The share of free GPU memory below which an engine has no useful room for weights and KV blocks."""
_GIB = 2**30
_UNSEEN_BYTES = 2 * _GIB  # an idle driver holds under 1 GiB of a large GPU

_SLOW: dict[ClockReason, str] = {
    "power limit": "wait until other work on it ends, or raise its limit with nvidia-smi -pl",
    "hardware slowdown": "look at temperature and power supply: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
    "sync boost": "take it out of its sync boost group: dcgmi group",
    "thermal, by software": "cool it: nvidia-smi -q -d TEMPERATURE says how hot it is",
    "thermal, by hardware": "cool it: nvidia-smi -q -d TEMPERATURE says how hot it is",
    "power brake": "look at the machine's power supply: it tells the GPU to slow down",
    "display clocks": "take its display away",
}


def judge_gpus(facts: Facts) -> Iterator[Check]:
    gpus = facts.gpus
    if gpus.problem is not None or not gpus.visible:
        yield _no_gpu(facts)
        return
    yield _driver(facts)
    for gpu in gpus.visible:
        yield from _gpu(gpu)
    yield from _links(facts)


def _no_gpu(facts: Facts) -> Check:
    gpus, environment = facts.gpus, facts.environment
    hidden = environment.get("CUDA_VISIBLE_DEVICES")
    if gpus.problem is None and gpus.installed and hidden is not None:
        seen, fix = f"CUDA_VISIBLE_DEVICES={hidden!r} hides all {gpus.installed} GPUs", "unset CUDA_VISIBLE_DEVICES"
        return failed("GPU", seen, "a visible GPU", fix) if facts.needs_gpu else absent("GPU", f"none: {seen}")
    if gpus.problem is not None and gpus.installed:
        return (failed if facts.needs_gpu else warning)(
            "driver",
            f"{gpus.installed} NVIDIA GPUs on the PCI bus, and NVML says {gpus.problem}",
            "a driver that answers",
            "in a container: start it with --gpus all; else install or reload the NVIDIA driver, or reboot",
        )
    if facts.needs_gpu:
        return failed("GPU", "none", "an NVIDIA GPU", "choose --engine torch, which runs on the CPU")
    return absent("GPU", "no GPU: the torch engine runs on the CPU")


def _driver(facts: Facts) -> Check:
    gpus, torch_cuda = facts.gpus, facts.software.torch_cuda
    torch = facts.software.packages.get("torch")
    runs = f", runs CUDA up to {gpus.cuda[0]}.{gpus.cuda[1]}" if gpus.cuda else ""
    seen = f"{gpus.driver}{runs}"
    if torch is not None and torch_cuda is None:
        return failed(
            "driver",
            f"{seen}; torch {torch.version} is built without CUDA",
            "a torch with CUDA",
            f"pip uninstall torch, then install torch {torch.version.split('+')[0]} in its build with CUDA, such as "
            f"{torch.version.split('+')[0]}+cu130, or export CUDA_VISIBLE_DEVICES= to serve on the CPU",
        )
    if torch_cuda is None or gpus.cuda is None:
        return ok("driver", seen)
    # Trust the driver's CUDA release: with a forward compatibility package, an older driver supports a newer CUDA.
    major = int(torch_cuda.split(".")[0])
    least = MINIMUM_DRIVERS.get(major)
    expected = f"CUDA {major}" + (f": driver {least} or newer" if least else "")
    if gpus.cuda[0] < major:
        older = max(gpus.cuda[0], min(MINIMUM_DRIVERS))
        return failed(
            "driver",
            f"{seen}; torch is built for CUDA {torch_cuda}",
            expected,
            f"install driver {least} or newer, the cuda-compat-{major}-0 package, or a torch built for CUDA {older}",
        )
    return ok("driver", f"{seen}; torch is built for CUDA {torch_cuda}", expected)


def _gpu(gpu: GpuFacts) -> Iterator[Check]:
    """Yields the row of a GPU, and one more row for each problem."""
    name = f"GPU {gpu.index}"
    yield ok(name, _summary(gpu))
    yield from _usable(name, gpu)
    yield from _memory(name, gpu)
    yield from _clocks(name, gpu)
    yield from _health(name, gpu)


def _summary(gpu: GpuFacts) -> str:
    parts = [gpu.name + (" (MIG slice)" if gpu.mig == "slice" else "")]
    if gpu.compute_capability is not None:
        parts.append("sm{}{}".format(*gpu.compute_capability))
    parts.append(f"{gpu.free_bytes / _GIB:.1f} of {gpu.memory_bytes / _GIB:.1f} GiB free")
    if gpu.sm_clock_mhz is not None:
        limit = f" of {gpu.max_sm_clock_mhz}" if gpu.max_sm_clock_mhz else ""
        parts.append(f"{gpu.sm_clock_mhz}{limit} MHz")
    if gpu.power_limit_w is not None:
        parts.append(f"{gpu.power_limit_w:.0f} W")
    return ", ".join(parts + (["clocks: " + " and ".join(gpu.clock_reasons)] if gpu.clock_reasons else []))


def _usable(name: str, gpu: GpuFacts) -> Iterator[Check]:
    if gpu.mig == "on":
        yield failed(
            f"{name} MIG",
            "MIG is on, and CUDA sees only slices",
            "MIG off, or a slice named",
            f"export CUDA_VISIBLE_DEVICES=MIG-<uuid> of nvidia-smi -L, or: sudo nvidia-smi -i {gpu.index} -mig 0",
        )
    if gpu.compute_capability is not None and gpu.compute_capability < LOWEST_CAPABILITY:
        yield failed(
            f"{name} architecture",
            "sm{}{}".format(*gpu.compute_capability),
            "sm80 (Ampere) or newer",
            "use another GPU with --gpus, or export CUDA_VISIBLE_DEVICES= to serve on the CPU",
        )
    if gpu.compute_mode in ("prohibited", "exclusive process"):
        row = failed if gpu.compute_mode == "prohibited" else warning
        yield row(f"{name} compute mode", gpu.compute_mode, "default", f"sudo nvidia-smi -i {gpu.index} -c DEFAULT")


def _memory(name: str, gpu: GpuFacts) -> Iterator[Check]:
    foreign = [process for process in gpu.processes if not process.is_ours]
    ours = [process for process in gpu.processes if process.is_ours]
    used = gpu.memory_bytes - gpu.free_bytes
    accounted = sum(process.memory_bytes or 0 for process in gpu.processes)
    held = [_held(process) for process in foreign]
    if not held and not ours and used - accounted > _UNSEEN_BYTES:
        held = [f"a process that this container can't see holds {used / _GIB:.1f} GiB"]
    is_full = gpu.free_bytes < LEAST_FREE * gpu.memory_bytes
    if not held and not (is_full and ours):
        return
    seen = "; ".join(held or [_held(process) for process in ours])
    row = failed if is_full else warning
    yield row(
        f"{name} memory",
        f"{seen}; {gpu.free_bytes / _GIB:.1f} GiB are free",
        "nothing else on it: an engine takes its KV blocks from what is free as it starts",
        "end that work, or choose other GPUs with --gpus",
    )


def _held(process: GpuProcess) -> str:
    name = process.name or "a process that this container can't see"
    size = f" holds {process.memory_bytes / _GIB:.1f} GiB" if process.memory_bytes is not None else ""
    return f"{name} (pid {process.pid}{', trtx' if process.is_ours else ''}){size}"


def _clocks(name: str, gpu: GpuFacts) -> Iterator[Check]:
    limit, usual = gpu.power_limit_w, gpu.default_power_limit_w
    if limit is not None and usual is not None and limit < usual - 1:
        yield warning(
            f"{name} power limit",
            f"{limit:.0f} W of {usual:.0f} W",
            "its default: a lower limit lowers the clocks under load",
            f"sudo nvidia-smi -i {gpu.index} -pl {usual:.0f}",
        )
    slow = [reason for reason in gpu.clock_reasons if reason in _SLOW]
    if slow:
        now = f"{gpu.sm_clock_mhz} of {gpu.max_sm_clock_mhz} MHz now: " if gpu.max_sm_clock_mhz else ""
        fixes = "; ".join(dict.fromkeys(_SLOW[reason] for reason in slow))
        yield warning(f"{name} clocks", now + " and ".join(slow), "full clocks: results are lower now", fixes)


def _health(name: str, gpu: GpuFacts) -> Iterator[Check]:
    if gpu.recovery is not None and gpu.recovery != "none":
        yield failed(
            f"{name} recovery",
            f"after an Xid error the driver asks for {gpu.recovery}",
            "nothing to recover from",
            "have an administrator do that; dmesg | grep -i xid says what happened",
        )
    if gpu.remap_failed:
        yield failed(f"{name} memory rows", "a bad row could not be remapped", "none", "have the GPU replaced")
    elif gpu.remap_pending:
        yield warning(
            f"{name} memory rows", "a bad row waits to be remapped", "none", "have an administrator reset the GPU"
        )
    if gpu.uncorrected_ecc_errors:
        yield warning(
            f"{name} ECC",
            f"{gpu.uncorrected_ecc_errors} uncorrected errors since the driver was loaded",
            "none",
            "see nvidia-smi -q -d ECC; have the GPU reset, and replaced if they come back",
        )
    if gpu.persistence is False and gpu.mig != "slice":
        yield warning(
            f"{name} persistence",
            "off: the driver unloads whenever nothing uses the GPU",
            "on: a worker starts seconds sooner",
            f"sudo nvidia-smi -i {gpu.index} -pm 1, or start nvidia-persistenced",
        )


def _links(facts: Facts) -> Iterator[Check]:
    gpus = facts.gpus
    waiting = [gpu.index for gpu in gpus.visible if gpu.fabric_ready is False]
    if waiting:
        yield warning(
            "NVLink fabric",
            f"not set up for GPU {_listed(waiting)}: CUDA answers error 802 until it is",
            "set up by the fabric manager",
            "sudo systemctl start nvidia-fabricmanager, of the driver's own version",
        )
    if len(gpus.visible) < 2:
        return
    yield _peers(gpus)
    most = max(gpu.nvlinks_up for gpu in gpus.visible)
    short = [gpu for gpu in gpus.visible if gpu.nvlinks_up < most]
    if short and len({gpu.name for gpu in gpus.visible}) == 1:
        down = ", ".join(f"GPU {gpu.index}: {gpu.nvlinks_up}" for gpu in short)
        yield warning(
            "NVLink links", f"{down} up, others {most}", "the same on all", "see nvidia-smi nvlink -s; reset or reseat"
        )
    if facts.environment.get("NCCL_P2P_DISABLE") == "1" and any(pair.nvlink for pair in gpus.pairs):
        yield warning(
            "NCCL_P2P_DISABLE",
            "1, although NVLink joins GPUs",
            "unset: tensor parallel workers go through host memory",
            "unset NCCL_P2P_DISABLE",
        )


def _peers(gpus: Gpus) -> Check:
    """Checks the links between GPUs. On some machines with only PCIe, the start of tensor parallel engines hangs
    (TensorRT-LLM #9680, ai-dynamo #1229)."""
    apart = [pair for pair in gpus.pairs if not pair.nvlink]
    links = max(gpu.nvlinks_up for gpu in gpus.visible)
    count = len(gpus.visible)
    if not apart:
        return ok("links", f"NVLink joins all {count} GPUs" + (f", {links} links each" if links else ""))
    refused = [pair for pair in apart if pair.peer_access is False]
    named = ", ".join(f"{pair.first}-{pair.second} ({pair.path})" for pair in apart[:6]) + (", …" if apart[6:] else "")
    access = f"; no peer access on {len(refused)} of them" if refused else ""
    return warning(
        "links",
        f"PCIe alone between {named}{access}",
        "NVLink between GPUs that serve one request: KV handoff and --tp go through it",
        "keep one worker's GPUs on NVLink with --gpus; if a worker of several hangs, export NCCL_P2P_DISABLE=1",
    )


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))
