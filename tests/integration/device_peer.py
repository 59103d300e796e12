"""An encoder that leaves embeddings on its device, as a process: ``python device_peer.py DEVICE ARENA_BYTES LEASE_S``.

Its ``TMPDIR`` is the reader's. A line of standard input is a JSON command, a line of standard output its answer; it
ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from embedding_peer import EmbeddingPeer, embedding

from trtx.ipc.shared_tensor import share
from trtx.torch_engine.embeddings import EmbeddingExports
from trtx.torch_engine.embeddings.device import DeviceArena


class Encoder(EmbeddingPeer):
    """On the last GPU that this process sees where it is on one."""

    def __init__(self, scratch: Path, *, device: str, arena_bytes: int, lease_s: float = 60.0) -> None:
        variables = {"TMPDIR": str(scratch)}
        if device == "cuda":
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            variables["CUDA_VISIBLE_DEVICES"] = (
                visible.split(",")[-1] if visible else str(torch.cuda.device_count() - 1)
            )
        super().__init__(__file__, device, arena_bytes, lease_s, **variables)

    def held(self) -> tuple[int, int]:
        """(leases, embeddings in the arena)"""
        leases, kept = self.ask("held")
        return leases, kept


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
