"""An encoder that leaves embeddings on its device, as a process: ``python device_peer.py DEVICE ARENA_BYTES LEASE_S``.

Its ``TMPDIR`` is the reader's. A line of standard input is a JSON command, a line of standard output its answer; it
ends with its input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from trtx.ipc.shared_tensor import share
from trtx.torch_engine.embeddings import EmbeddingExports, EmbeddingHandle
from trtx.torch_engine.embeddings.device import DeviceArena
from trtx.torch_engine.embeddings.handle import parse_handle

WIDTH = 4096
DTYPE = "bfloat16"


def embedding(seed: int, rows: int) -> torch.Tensor:
    """The same here as there."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Encoder:
    """Handle of a peer process, on the last GPU that this one sees where it is on one."""

    def __init__(self, scratch: Path, *, device: str, arena_bytes: int, lease_s: float = 60.0) -> None:
        command = [sys.executable, str(Path(__file__)), device, str(arena_bytes), str(lease_s)]
        environment = os.environ | {"TMPDIR": str(scratch)}
        if device == "cuda":
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            last = visible.split(",")[-1] if visible else str(torch.cuda.device_count() - 1)
            environment["CUDA_VISIBLE_DEVICES"] = last
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, *command: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(command), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def offer(self, seed: int, rows: int) -> EmbeddingHandle:
        return parse_handle(self.ask("offer", seed, rows))

    def held(self) -> tuple[int, int]:
        """(leases, embeddings in the arena)"""
        leases, kept = self.ask("held")
        return leases, kept

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for end in (self.process.stdin, self.process.stdout):
            assert end is not None
            end.close()


def main() -> None:
    device = torch.device(sys.argv[1])
    exports, arena = EmbeddingExports(lease_s=float(sys.argv[3])), DeviceArena(int(sys.argv[2]), device)
    for line in sys.stdin:
        answer: Any
        match json.loads(line):
            case ["offer", seed, rows]:
                made = embedding(seed, rows)
                shared = arena.keep(made.to(device)) or share(made)
                answer = exports.offer(seed.to_bytes(32, "big"), shared, None).to_dict()
            case ["held"]:
                exports.sweep()
                answer = [exports.leases, len(arena)]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
