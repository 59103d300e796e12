"""The table of known GPUs: memory and compute capability by name, for planning on a machine without these GPUs."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from trtx.errors import UsageError
from trtx.memory.units import MIB


@dataclass(frozen=True, slots=True)
class MemoryDevice:
    """The device that a worker's memory is planned for: one GPU, or on a CPU the host's share for one rank.

    ``free_bytes``: None if unknown; the plan then assumes that no other process uses the device. ``capability``: None
    if unknown, and for a CPU.
    """

    name: str
    total_bytes: int
    free_bytes: int | None = None
    is_gpu: bool = True
    capability: tuple[int, int] | None = None

    @property
    def free_now(self) -> int:
        return self.total_bytes if self.free_bytes is None else self.free_bytes


@dataclass(frozen=True, slots=True)
class _Known:
    name: str  # a prefix of NVML's name, without "NVIDIA "
    aliases: tuple[str, ...]
    mib: int  # NVML's total
    capability: tuple[int, int]
    seen: bool = True  # False: the vendor's nominal size; NVML reports a few percent less


# Totals as nvidia-smi shows them (memory.total, MiB) in public logs, except the nominal ones. A name that contains
# another name comes before it. The first alias is the name in listings.
_KNOWN = (
    _Known("A100-SXM4-40GB", ("A100-40GB", "A100-40"), 40960, (8, 0)),
    _Known("A100-SXM4-80GB", ("A100", "A100-80GB", "A100-80", "A100 80GB PCIe"), 81920, (8, 0)),
    _Known("L40S", ("L40S",), 46068, (8, 9)),
    _Known("L4", ("L4",), 23034, (8, 9)),
    _Known("H100 NVL", ("H100-NVL",), 95830, (9, 0)),
    _Known("H100 80GB HBM3", ("H100", "H100-80GB", "H100 PCIe"), 81559, (9, 0)),
    _Known("GH200 480GB", ("GH200",), 97871, (9, 0)),
    _Known("H200", ("H200", "H200 NVL"), 143771, (9, 0)),
    _Known("GB200", ("GB200",), 189471, (10, 0)),
    _Known("B200", ("B200",), 183359, (10, 0)),
    _Known("GB300", ("GB300",), 288_000_000_000 // MIB, (10, 3), seen=False),
    _Known("B300", ("B300",), 288_000_000_000 // MIB, (10, 3), seen=False),
    _Known("GeForce RTX 4090", ("RTX 4090", "4090"), 24564, (8, 9)),
    _Known("GeForce RTX 5090", ("RTX 5090", "5090"), 32607, (12, 0)),
)


def known_gpus() -> tuple[str, ...]:
    """Returns the names that :func:`device_named` lists in its error message."""
    return tuple(known.aliases[0] for known in _KNOWN)


def device_named(name: str) -> MemoryDevice:
    """Returns a GPU of the table, such as ``H200``, with all of its memory free. Raises UsageError if it is unknown."""
    wanted = _plain(name)
    for known in _KNOWN:
        if wanted in map(_plain, (known.name, *known.aliases)):
            label = known.name if known.seen else f"{known.name}, nominal memory"
            return MemoryDevice(label, known.mib * MIB, capability=known.capability)
    near = difflib.get_close_matches(name.upper(), known_gpus(), n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UsageError(f"GPU {name!r} is not in trtx's table; {hint}Known: {', '.join(known_gpus())}")


def capability_of(name: str) -> tuple[int, int] | None:
    """Returns the compute capability for NVML's name (``NVIDIA H100 80GB HBM3``); None if the table lacks the GPU."""
    seen = _plain(name)
    for known in _KNOWN:
        if any(_plain(candidate) in seen for candidate in (known.name, *known.aliases)):
            return known.capability
    return None


def _plain(name: str) -> str:
    return "".join(character for character in name.lower().removeprefix("nvidia ") if character.isalnum())
