"""Measures how fast KV blocks move from a prefill process to a decode process, compared with a peer copy.

It transfers blocks of Qwen3-8B's KV shape (36 layers, 8 KV heads, 128 dim, bf16: 147,456 bytes per token) through
``create_transport``, as the engine does, with each transport: random blocks of one pool into random blocks of the
other, one read per prompt. Each process sees its own GPU through CUDA_VISIBLE_DEVICES. The reference is one process
that sees both GPUs and copies the same number of contiguous bytes. After the last read of each size, the content of
each block is compared with its source.

    python benchmarks/kv_handoff.py                                # two GPUs, under 60 s, 4.8 GB on each
    python benchmarks/kv_handoff.py --device cpu --tokens 1024     # no GPU: CPU memory, and memcpy as the reference

Columns: ``GB/s`` is the median over the repeats, from before ``begin_read`` to the poll that reports the end, with a
loop that only polls; the next column is its share of the reference. ``engine GB/s`` is the same with the pauses of an
idle engine between polls. ``begin`` is the median duration of ``begin_read``, which the step loop has to wait for.
``first`` is the first read of that size; the very first read of a transport starts a second after both sides have
started. With ``--json`` the last line of stdout is the table as one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any

from trtx.torch_engine.core.handoffs import READ_POLL_S, READ_SPIN_S
from trtx.torch_engine.handoff import ROUTES, FinishedRead, KvTransport, create_transport
from trtx.torch_engine.kv_layout import KvGeometry

if TYPE_CHECKING:
    import torch

WARM_UP = 20  # warm-up reads of each size; the first of them is shown as "first"
CHILD_TIMEOUT_S = 90
GROUP_VARIABLE = "TRTX_KV_HANDOFF_GROUP"


def main() -> None:
    options = _parse()
    if options.role is not None:
        _ROLES[options.role](options)
        return
    devices = options.gpus.split(",") if options.device == "cuda" else ["", ""]
    os.environ[GROUP_VARIABLE] = f"kv-handoff-{os.getpid()}"
    near, far = Pipe()
    reference = _start(options, "reference", ",".join(devices))
    prefill = _start(options, "prefill", devices[0], near)
    decode = _start(options, "decode", devices[1], far)
    children = [reference, prefill, decode]
    near.close()
    far.close()
    try:
        reads = _result(decode)
        copies = _result(reference)  # closes its stdin, which starts it; nothing else runs at the same time
    finally:
        for child in children:
            child.kill()
            child.wait()
    table = {"device": reads["device"], "conditions": _conditions(options), "rows": []}
    for row in reads["rows"]:
        table["rows"].append(row | {"copy_gbps": copies["gbps"][str(row["tokens"])]})
    _print(table, options)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", default="0,1", help="prefill's and decode's, as CUDA_VISIBLE_DEVICES takes them")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--tokens-per-block", type=int, default=32)
    parser.add_argument("--routes", choices=ROUTES, nargs="+", default=list(ROUTES))
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--role", choices=list(_ROLES), help=argparse.SUPPRESS)
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _start(
    options: argparse.Namespace, role: str, devices: str, pipe: Connection | None = None
) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, *sys.argv[1:], "--role", role]
    fds = [pipe.fileno()] if pipe is not None else []
    return subprocess.Popen(
        command + [f"--fd={fd}" for fd in fds],
        pass_fds=fds,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": devices, "UCX_NET_DEVICES": "lo"},
    )


def _result(child: subprocess.Popen[str]) -> dict[str, Any]:
    """Waits for a child process and returns the JSON document in its last line."""
    try:
        output, _ = child.communicate(timeout=CHILD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise SystemExit(
            f"kv_handoff: a process did not end within {CHILD_TIMEOUT_S} s; its messages are above"
        ) from None
    if child.returncode != 0:
        raise SystemExit(f"kv_handoff: a process ended with exit code {child.returncode}; its messages are above")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def _geometry(options: argparse.Namespace) -> KvGeometry:
    return KvGeometry.uniform(
        num_layers=36, num_kv_heads=8, head_dim=128, tokens_per_block=options.tokens_per_block, dtype="bfloat16"
    )


def _pool(options: argparse.Namespace) -> torch.Tensor:
    import torch

    torch.set_num_threads(1)
    g = _geometry(options)
    num_blocks = max(options.tokens) // g.tokens_per_block + 64
    return torch.zeros(num_blocks, *g.block_shape, dtype=torch.bfloat16, device=options.device)


def _prefill(options: argparse.Namespace) -> None:
    """Runs the prefill process: exports the requested blocks until the decode process has ended."""
    import torch

    pool = _pool(options)
    words = pool.view(pool.shape[0], -1).view(torch.int32)
    words.copy_(torch.arange(1, pool.shape[0] + 1, dtype=torch.int32, device=pool.device).unsqueeze(1))
    _synchronize(pool)
    transport = create_transport(pool, _geometry(options), group=os.environ[GROUP_VARIABLE])
    connection = Connection(options.fd)
    lease_id = 0
    while True:
        try:
            block_ids, num_tokens = connection.recv()
        except EOFError:
            return transport.close()
        connection.send(transport.export(lease_id, block_ids, num_tokens, time.time() + 60))
        lease_id += 1
        transport.poll()


def _decode(options: argparse.Namespace) -> None:
    import torch

    pool = _pool(options)
    connection = Connection(options.fd)
    rows = [row for route in options.routes for row in _reads(options, pool, connection, route)]
    device = torch.cuda.get_device_name() if pool.is_cuda else "CPU memory"
    print(json.dumps({"device": device, "rows": rows}))


def _reads(
    options: argparse.Namespace, pool: torch.Tensor, connection: Connection, route: str
) -> list[dict[str, str | float]]:
    import torch

    words = pool.view(pool.shape[0], -1).view(torch.int32)
    transport = create_transport(pool, _geometry(options), routes=[route], group=os.environ[GROUP_VARIABLE])
    connection.send(([0], options.tokens_per_block))
    connection.recv()  # wait until the other side has started
    time.sleep(1)
    draw = random.Random(0)
    rows: list[dict[str, str | float]] = []
    for num_tokens in options.tokens:
        num_blocks = num_tokens // options.tokens_per_block

        def read(*, paced: bool = False, is_checked: bool = False, count: int = num_blocks) -> tuple[float, float]:
            remote = draw.sample(range(pool.shape[0]), count)
            local = draw.sample(range(pool.shape[0]), count)
            connection.send((remote, count * options.tokens_per_block))
            timing = _timed_read(transport, connection.recv(), local, paced)
            for here, there in zip(local, remote, strict=True) if is_checked else ():
                assert bool((words[here] == there + 1).all()), f"block {here} does not hold block {there} of prefill"
            return timing

        first = read()
        busy = [read() for _ in range(WARM_UP + options.repeats)][WARM_UP:]
        paced = [read(paced=True) for _ in range(options.repeats)]
        read(is_checked=True)
        num_bytes = num_blocks * _geometry(options).block_bytes
        rows.append(
            {
                "route": route,
                "tokens": num_tokens,
                "mib": num_bytes / 2**20,
                "gbps": num_bytes / statistics.median(total for _, total in busy) / 1e9,
                "engine_gbps": num_bytes / statistics.median(total for _, total in paced) / 1e9,
                "total_ms": statistics.median(total for _, total in busy) * 1e3,
                "begin_ms": statistics.median(begin for begin, _ in busy) * 1e3,
                "first_ms": first[1] * 1e3,
            }
        )
    transport.close()
    return rows


def _timed_read(transport: KvTransport, opaque_state: bytes, local: list[int], paced: bool) -> tuple[float, float]:
    """Returns the seconds of ``begin_read``, and of the whole read."""
    began = time.perf_counter()
    transport.begin_read(opaque_state, range(len(local)), local)
    begun = time.perf_counter()
    while not (events := transport.poll()):
        if paced and time.perf_counter() - begun > READ_SPIN_S:
            time.sleep(READ_POLL_S)
    ended = time.perf_counter()
    assert isinstance(events.finished[0], FinishedRead), events.failed
    return begun - began, ended - began


def _reference(options: argparse.Namespace) -> None:
    """Runs the reference process, which copies the same numbers of bytes from GPU to GPU or within CPU memory."""
    import torch

    source_device, target_device = ("cuda:0", "cuda:1") if options.device == "cuda" else ("cpu", "cpu")
    sys.stdin.read()  # wait for the parent's signal to start
    torch.set_num_threads(1)
    block_bytes = _geometry(options).block_bytes
    sizes = {tokens: tokens // options.tokens_per_block * block_bytes for tokens in options.tokens}
    source = torch.ones(max(sizes.values()), dtype=torch.uint8, device=source_device)
    target = torch.zeros(max(sizes.values()), dtype=torch.uint8, device=target_device)
    gbps = {}
    for tokens, size in sizes.items():
        seconds = []
        for _ in range(WARM_UP + options.repeats):
            _synchronize(source, target)
            began = time.perf_counter()
            target[:size].copy_(source[:size])
            _synchronize(source, target)
            seconds.append(time.perf_counter() - began)
        gbps[tokens] = size / statistics.median(seconds[WARM_UP:]) / 1e9
    print(json.dumps({"gbps": gbps}))


def _synchronize(*tensors: torch.Tensor) -> None:
    import torch

    for tensor in tensors:
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)


_ROLES: dict[str, Callable[[argparse.Namespace], None]] = {
    "prefill": _prefill,
    "decode": _decode,
    "reference": _reference,
}


def _conditions(options: argparse.Namespace) -> str:
    return (
        f"{options.tokens_per_block}-token blocks of {_geometry(options).block_bytes / 2**20:.2f} MiB, "
        f"{options.repeats} repeats, torch {version('torch')}, nixl {version('nixl')}, Python {sys.version.split()[0]}"
    )


def _print(table: dict[str, Any], options: argparse.Namespace) -> None:
    reference = "peer copy" if options.device == "cuda" else "memcpy"
    print(f"KV handoff, {table['device']}, {table['conditions']}")
    print(
        f"{'route':>7} {'tokens':>7} {'MiB':>6} {'GB/s':>7} {'share':>7} {'engine GB/s':>12} {'ms':>8} {'begin ms':>9} "
        f"{'first ms':>9} ",
        end="",
    )
    print(f"{reference + ' GB/s':>15}")
    for r in table["rows"]:
        print(
            f"{r['route']:>7} {r['tokens']:>7} {r['mib']:>6.0f} {r['gbps']:>7.1f} {r['gbps'] / r['copy_gbps']:>7.1%} "
            f"{r['engine_gbps']:>12.1f} {r['total_ms']:>8.3f} {r['begin_ms']:>9.3f} {r['first_ms']:>9.3f} "
            f"{r['copy_gbps']:>15.1f}"
        )
    if options.json:
        print(json.dumps(table))


if __name__ == "__main__":
    main()
