"""A prefill engine's half of a KV handoff on a GPU, as a process of its own: ``python cuda_exporter.py FD NUM_BLOCKS``.

Every int32 of block b of its pool is b + 1. Answers commands on a ``multiprocessing`` connection until it closes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch

from trtx.torch_engine.handoff import ROUTES, TransportEvents, create_transport
from trtx.torch_engine.kv_layout import KvGeometry

GEOMETRY = KvGeometry.uniform(num_layers=36, num_kv_heads=8, head_dim=128, tokens_per_block=32, dtype="bfloat16")
START_S = 90


def new_pool(num_blocks: int) -> torch.Tensor:
    return torch.zeros(num_blocks, *GEOMETRY.block_shape, dtype=torch.bfloat16, device="cuda")


def words(pool: torch.Tensor) -> torch.Tensor:
    """``[num_blocks, int32s of a block]``"""
    return pool.view(pool.shape[0], -1).view(torch.int32)


class CudaExporter:
    """Handle of a peer process on the last GPU that this one sees, which may be the same."""

    def __init__(self, num_blocks: int, routes: tuple[str, ...] = ROUTES, env: dict[str, str] | None = None) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        last = visible.split(",")[-1] if visible else str(torch.cuda.device_count() - 1)
        self._connection, theirs = Pipe()
        command = [sys.executable, str(Path(__file__)), str(theirs.fileno()), str(num_blocks), *routes]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=os.environ | {"CUDA_VISIBLE_DEVICES": last} | (env or {})
        )
        theirs.close()
        self.pid = self._process.pid

    def ask(self, *command: Any) -> Any:
        self._connection.send(command)
        if not self._connection.poll(START_S):
            raise TimeoutError(f"exporter {self.pid} did not answer {command[0]} within {START_S} s")
        return self._connection.recv()

    def export(self, lease_id: int, block_ids: list[int], deadline_s: float | None = None) -> bytes:
        answer: bytes = self.ask("export", lease_id, block_ids, deadline_s or time.time() + 60)
        return answer

    def wait_for_release(self) -> list[int]:
        deadline = time.monotonic() + 30
        while not (released := list(self.ask("poll").released)):
            assert time.monotonic() < deadline, "no lease was released within 30 s"
            time.sleep(0.002)
        return released

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()


def serve(connection: Connection, num_blocks: int, routes: list[str]) -> None:
    pool = new_pool(num_blocks)
    words(pool).copy_(torch.arange(1, num_blocks + 1, dtype=torch.int32, device="cuda").unsqueeze(1))
    torch.cuda.synchronize()
    transport = create_transport(pool, GEOMETRY, routes=routes)
    while True:
        try:
            name, *arguments = connection.recv()
        except EOFError:
            return transport.close()
        if name == "export":
            lease_id, block_ids, deadline_s = arguments
            tokens = len(block_ids) * GEOMETRY.tokens_per_block
            connection.send(transport.export(lease_id, block_ids, tokens, deadline_s))
        else:
            events: TransportEvents = transport.poll()
            connection.send(events)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3:])
