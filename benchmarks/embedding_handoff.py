"""Measures how fast embeddings move from an encoder process to an engine process, compared with a peer copy.

Two processes of one host run on two GPUs, or on one GPU if there is only one. With ``device``, rows stay in the
encoder's arena and the engine copies them from there (CUDA IPC). With ``file``, they pass through a file in the scratch
directory. The reference is one process that copies the same number of contiguous bytes between the two GPUs. The last
embedding of each size is checked bit by bit.

    python benchmarks/embedding_handoff.py                             # rows of Qwen2.5-VL 7B; 1296 are 1 megapixel
    python benchmarks/embedding_handoff.py --device cpu --rows 1296    # no GPU: process_vm_readv, and memcpy beside it

Columns are medians: ``keep`` is the time of the encoder, ``take`` the time of the engine including its check for NaN,
``GB/s`` the bytes over the sum of both, ``first`` the very first take, which opens the other process's memory. With
``--json`` the last line of stdout is the table as one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch

from trtx.ipc.shared_tensor import SharedTensor, remove_shared, share
from trtx.torch_engine.embeddings.device import DeviceArena
from trtx.torch_engine.runner.embeddings import EmbeddingLoader

ARENA_BYTES = 512 << 20
WARM_UP = 5
TIMEOUT_S = 120


def embedding(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).bfloat16()


def encode(options: argparse.Namespace) -> None:
    """Runs the encoder process: keeps the requested embeddings, and reports the time."""
    connection = Connection(options.fd)
    device = torch.device(options.device)
    arena = DeviceArena(ARENA_BYTES, device)
    made = {rows: embedding(rows, options.width).to(device) for rows in options.rows}
    while True:
        try:
            way, rows = connection.recv()
        except EOFError:
            return arena.close()
        _synchronize(device)
        began = time.perf_counter()
        shared = arena.keep(made[rows]) if way == "device" else share(made[rows].cpu())
        took = time.perf_counter() - began
        assert shared is not None, f"the arena has no room for {rows} rows"
        connection.send(((shared.path, shared.dtype, shared.shape), took))


def measure(options: argparse.Namespace, encoder: Connection) -> Iterator[dict[str, Any]]:
    """Yields the rows of the table as they are measured."""
    device = torch.device(options.device)
    loader = EmbeddingLoader(device, options.width, torch.bfloat16)
    for way in options.ways:
        first: float | None = None
        for rows in options.rows:
            keeps, takes = [], []
            for _ in range(WARM_UP + options.repeats):
                encoder.send((way, rows))
                if not encoder.poll(TIMEOUT_S):
                    raise SystemExit(f"the encoder's process did not answer within {TIMEOUT_S} s")
                told, keep_s = encoder.recv()
                shared = SharedTensor(*told)
                began = time.perf_counter()
                loaded = loader.load(shared)
                takes.append(time.perf_counter() - began)
                keeps.append(keep_s)
                first = takes[0] if first is None else first
                remove_shared(shared)
            assert first is not None
            assert torch.equal(loaded.tensor.cpu(), embedding(rows, options.width)), f"{way}: other rows arrived"
            keep_s, take_s = statistics.median(keeps[WARM_UP:]), statistics.median(takes[WARM_UP:])
            size = rows * options.width * 2
            copy_s = _peer_copy_s(size, options)
            yield {
                "way": way, "rows": rows, "bytes": size, "keep_ms": keep_s * 1e3, "take_ms": take_s * 1e3,
                "first_ms": first * 1e3, "gbps": size / (keep_s + take_s) / 1e9, "take_gbps": size / take_s / 1e9,
                "copy_gbps": size / copy_s / 1e9,
            }  # fmt: skip
    loader.close()


def _peer_copy_s(size: int, options: argparse.Namespace) -> float:
    """Returns the seconds of a copy from the last GPU to the first, or within a single GPU; on a CPU of memcpy."""
    last = f"cuda:{torch.cuda.device_count() - 1}" if options.device == "cuda" else "cpu"
    source = torch.ones(size, dtype=torch.uint8, device=last)
    target = torch.zeros(size, dtype=torch.uint8, device=options.device)
    seconds = []
    for _ in range(WARM_UP + options.repeats):
        _synchronize(source.device)
        _synchronize(target.device)
        began = time.perf_counter()
        target.copy_(source)
        _synchronize(source.device)
        _synchronize(target.device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[WARM_UP:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 1296, 16384])
    parser.add_argument("--width", type=int, default=3584)
    parser.add_argument("--ways", nargs="+", choices=["device", "file"], default=["device", "file"])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fd is not None:
        encode(options)
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    with tempfile.TemporaryDirectory(prefix="trtx-embeddings-") as scratch:
        tempfile.tempdir = scratch
        near, far = Pipe()
        environment = os.environ | {"TMPDIR": scratch, "CUDA_VISIBLE_DEVICES": gpus[-1] if gpus else ""}
        child = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--fd", str(far.fileno())],
            pass_fds=[far.fileno()], env=environment,
        )  # fmt: skip
        far.close()
        where = f"{torch.cuda.get_device_name(0)}, {len(gpus)} of them" if options.device == "cuda" else "CPU"
        print(f"{where}, {options.width} columns of bfloat16")
        print("way      rows        MB  keep ms  take ms  first ms    GB/s  peer copy GB/s", flush=True)
        rows = []
        try:
            for row in measure(options, near):
                rows.append(row)
                print(f"{row['way']:6} {row['rows']:6} {row['bytes'] / 1e6:9.2f} {row['keep_ms']:8.3f} "
                      f"{row['take_ms']:8.3f} {row['first_ms']:9.2f} {row['gbps']:7.2f} "
                      f"{row['copy_gbps']:15.2f}", flush=True)  # fmt: skip
        finally:
            near.close()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            tempfile.tempdir = None
    if options.json:
        print(json.dumps({"device": where, "rows": rows}))


if __name__ == "__main__":
    main()
