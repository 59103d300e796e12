"""A prefill engine's half of a KV handoff, as a process of its own: ``python handoff_peer.py FD SEED NUM_BLOCKS``.

Fills a pool with bytes drawn from SEED and answers commands on a ``multiprocessing`` connection until it closes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch

from trtx.torch_engine.handoff import KvTransport, create_transport
from trtx.torch_engine.kv_layout import KvGeometry

GEOMETRY = KvGeometry.uniform(num_layers=2, num_kv_heads=2, head_dim=16, tokens_per_block=32, dtype="float32")


def empty_pool(num_blocks: int, geometry: KvGeometry = GEOMETRY) -> torch.Tensor:
    return torch.zeros((num_blocks, *geometry.block_shape), dtype=getattr(torch, geometry.dtype))


def random_pool(num_blocks: int, seed: int) -> torch.Tensor:
    """What a peer started with ``seed`` holds: the same here as there."""
    pool = empty_pool(num_blocks)
    return pool.copy_(torch.rand(pool.shape, generator=torch.Generator().manual_seed(seed)))


class Exporter:
    """Handle of a peer process. Each method is one command to it and its answer."""

    def __init__(self, seed: int, num_blocks: int, env: dict[str, str] | None = None) -> None:
        self._connection, theirs = Pipe()
        command = [sys.executable, str(Path(__file__)), str(theirs.fileno()), str(seed), str(num_blocks)]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=os.environ | (env or {}))
        theirs.close()
        self.pid = self.process.pid

    def ask(self, *command: Any) -> Any:
        self._connection.send(command)
        if not self._connection.poll(300):
            raise TimeoutError(f"peer {self.pid} did not answer {command[0]} within 300 s")
        return self._connection.recv()

    def export(self, lease_id: int, block_ids: list[int], deadline_s: float | None = None) -> bytes:
        answer: bytes = self.ask("export", lease_id, block_ids, deadline_s or time.time() + 60)
        return answer

    def wait_for_release(self, *lease_ids: int) -> None:
        """Returns when the peer saw these released; releases of earlier reads may come between."""
        waiting = set(lease_ids)
        deadline = time.monotonic() + 30
        while waiting:
            waiting -= set(self.ask("poll").released)
            if time.monotonic() > deadline:
                raise TimeoutError(f"leases {sorted(waiting)} were not released within 30 s")
            time.sleep(0.005)

    def wait_until_thawed(self) -> None:
        """Returns when the process, continued after SIGSTOP, has answered or has ended.

        It may end: over TCP, UCX 1.21 aborts a process whose reader went away in the middle of a read.
        """
        with contextlib.suppress(EOFError, OSError):
            self.ask("poll")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._connection.close()


def serve(connection: Connection, seed: int, num_blocks: int) -> None:
    torch.set_num_threads(1)
    pool = random_pool(num_blocks, seed)
    transport: KvTransport = create_transport(pool, GEOMETRY)
    while True:
        try:
            name, *arguments = connection.recv()
        except EOFError:
            return transport.close()
        if name == "export":
            lease_id, block_ids, deadline_s = arguments
            num_tokens = len(block_ids) * GEOMETRY.tokens_per_block
            connection.send(transport.export(lease_id, block_ids, num_tokens, deadline_s))
        elif name == "poll":
            connection.send(transport.poll())
        elif name == "idle":
            before = time.process_time()
            time.sleep(arguments[0])
            connection.send(time.process_time() - before)


if __name__ == "__main__":
    fd, seed, num_blocks = map(int, sys.argv[1:])
    serve(Connection(fd), seed, num_blocks)
