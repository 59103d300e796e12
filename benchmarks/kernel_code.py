"""Compiles the Triton kernels of some models for sm_90, without a GPU, and prints what the compiler made of each.

    python benchmarks/kernel_code.py                       # of all three models
    python benchmarks/kernel_code.py --models qwen3-8b

Keep the output from before a change and compare it with the one after it, with ``diff``: without a difference, a GPU
runs the same code. An argument that only other models use changes the text behind the hash, not the code:
``cut -c -57`` leaves the code.

A line is one variant of a kernel: a kernel compiled for some types, alignments and constants. It has the registers of a
thread, its bytes of local memory ("stack", where spilled registers go), a program's bytes of shared memory, a hash of
the PTX without comments, the engines that launch the variant, and its arguments. The first line names the
versions of Triton and ptxas, which change the code too.

The variants are those that the torch engine's own launches ask for: forwards of many sizes, through the real decoder,
with tensors on torch's ``meta`` device, which have shapes and addresses but no memory. Each model is taken in bfloat16,
with weights and KV in FP8, with FP8 weights whose rows or blocks have scales, and ``--deterministic`` in bfloat16; with
the engine's default sizes and all sampling kernels. Left out are draft models, vision towers, the copies of a KV
handoff, and ranks of ``--tp``.

It needs the package triton, which torch for CPUs does not bring:
``pip install --no-deps --target DIR triton==3.6.0``, with DIR on ``PYTHONPATH``. Triton's own ptxas is used. Compiled
kernels are kept in Triton's cache, so a second run compiles only what changed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trtx.checkpoint import resolve_checkpoint
from trtx.checkpoint.model_config import read_model_config

CAPABILITY = 90
MODELS = ("qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b")


@dataclass(frozen=True)
class Variant:
    """What the compiler made of one variant of a kernel."""

    name: str
    arguments: str
    registers: int  # of a thread
    stack_bytes: int  # of a thread: local memory, where spilled registers go
    shared_bytes: int  # of a program
    ptx_hash: str

    def __str__(self) -> str:
        numbers = f"{self.registers:>4} {self.stack_bytes:>5} {self.shared_bytes:>7}"
        return f"{self.name:<24} {numbers}  {self.ptx_hash}"


class _Pointer:
    """A tensor as Triton's launcher sees it: a type and an address, here the offset from an aligned allocation."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._offset = int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        return self._offset


class _Device:
    """Stands in for Triton's driver: there is no GPU, and the target is sm_90."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", CAPABILITY, 32)


class Recorder:
    """Compiles what is launched while it records, and launches nothing."""

    def __init__(self) -> None:
        self.users: dict[str, dict[str, None]] = {}  # by the kernel's hash, in the order of first use
        self.kernels: dict[str, Any] = {}

    @contextmanager
    def recording(self, user: str) -> Iterator[None]:
        """``user``: what the launches belong to. Triton has no GPU meanwhile, whatever this machine has."""
        from triton import knobs
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        run = JITFunction.run

        def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            pointers = [_Pointer(arg) if isinstance(arg, Tensor) else arg for arg in args]
            kernel = run(function, *pointers, grid=grid, warmup=True, **options)
            self.kernels[kernel.hash] = kernel
            self.users.setdefault(kernel.hash, {})[user] = None
            return kernel

        driver.set_active(_Device())
        JITFunction.run = compile_only
        try:
            with knobs.compilation.scope():
                knobs.compilation.disable_line_info = True  # it would change the PTX with every line of the file
                yield
        finally:
            JITFunction.run = run
            driver.set_active(None)

    def variants(self) -> list[tuple[Variant, list[str]]]:
        """Returns each variant with its users, sorted by its code, so that a new argument moves no line."""
        found = [(_variant(kernel), list(self.users[key])) for key, kernel in self.kernels.items()]
        return sorted(found, key=lambda one: (str(one[0]), one[0].arguments))


def _variant(kernel: Any) -> Variant:
    registers, stack = _resources(kernel.asm["cubin"])
    text = "\n".join(
        line
        for line in re.sub(r"//.*", "", kernel.asm["ptx"]).splitlines()
        if line.strip() and not line.lstrip().startswith((".file", ".loc"))
    )
    return Variant(
        kernel.metadata.name, _arguments(kernel), registers, stack, kernel.metadata.shared,
        hashlib.sha256(text.encode()).hexdigest()[:12],
    )  # fmt: skip


def _arguments(kernel: Any) -> str:
    """Types with ``:16`` for multiples of 16, constants, and the options of the launch."""
    source = kernel.src
    constants = {source.fn.arg_names[place[0]]: value for place, value in source.constants.items()}
    aligned = {source.fn.arg_names[place[0]] for place, attributes in source.attrs.items() if attributes}
    words = [
        f"{name}={constants[name]}" if kind == "constexpr" else f"{name}:{kind}{':16' if name in aligned else ''}"
        for name, kind in source.signature.items()
    ]
    options = kernel.metadata
    words += [f"warps={options.num_warps}", f"stages={options.num_stages}"]
    words += [f"registers<={options.maxnreg}"] if options.maxnreg else []
    words += [] if options.enable_fp_fusion else ["no fusion"]
    return " ".join(words)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Returns (registers, bytes of stack) of a thread, as cuobjdump reads them from a compiled kernel."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True, timeout=60)
    return resources_in(done.stdout)


def resources_in(text: str) -> tuple[int, int]:
    """Returns (registers, bytes of stack) of a thread from the output of ``cuobjdump -res-usage`` for one kernel."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise ValueError(f"cuobjdump names no registers: {text[:200]!r}")
    return int(found[1]), int(found[2])


def variants_of(models: Sequence[str]) -> list[tuple[Variant, list[str]]]:
    """Compiles the kernels of ``models``, synthetic shapes. Returns each variant with the engines that launch it."""
    from kernel_launches import ARITHMETICS, Engine

    recorder = Recorder()
    for model in models:
        config = read_model_config(resolve_checkpoint(f"synthetic:{model}").path)
        for arithmetic in ARITHMETICS:
            with recorder.recording(f"{model} {arithmetic}"):
                Engine(config, arithmetic).run()
    return recorder.variants()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="synthetic shapes, with commas between them")
    models = parser.parse_args(arguments).models.split(",")
    if importlib.util.find_spec("triton") is None:
        parser.error(
            "the package triton is not installed; run pip install --no-deps --target DIR triton==3.6.0, and put DIR on "
            "PYTHONPATH"
        )
    import triton
    from triton.backends.nvidia.compiler import get_ptxas

    print(f"Triton {triton.__version__}, ptxas {get_ptxas(CAPABILITY).version}, sm_{CAPABILITY}, {', '.join(models)}")
    print(f"{'kernel':<24} regs stack  shared  PTX           engines | arguments")
    for variant, users in variants_of(models):
        print(f"{variant}  {', '.join(users)} | {variant.arguments}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
