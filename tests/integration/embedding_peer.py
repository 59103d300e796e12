"""The end that keeps embeddings, as a process of its own: ``python embedding_peer.py ARENA_BYTES LEASE_S``.

A line of standard input is a JSON command, a line of standard output its answer; it ends with its input.
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
from trtx.torch_engine.embeddings import EmbeddingExports, EmbeddingHandle, NoRoom
from trtx.torch_engine.embeddings.handle import parse_handle

WIDTH = 4096
DTYPE = "bfloat16"


def embedding(seed: int, rows: int) -> torch.Tensor:
    """The same here as there."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


class EmbeddingPeer:
    """Handle of a process that keeps embeddings and answers one JSON command a line."""

    def __init__(self, program: str, *words: object, **variables: str) -> None:
        command = [sys.executable, program, *map(str, words)]
        environment = os.environ | variables
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, *command: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(command), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def offer(self, seed: int, rows: int) -> EmbeddingHandle:
        return parse_handle(self.ask("offer", seed, rows))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for end in (self.process.stdin, self.process.stdout):
            assert end is not None
            end.close()


class Exporter(EmbeddingPeer):
    """With a scratch directory of its own: its files are not the reader's to take."""

    def __init__(self, scratch: Path, *, arena_bytes: int, lease_s: float) -> None:
        scratch.mkdir()
        super().__init__(__file__, arena_bytes, lease_s, TMPDIR=str(scratch))


def main() -> None:
    exports = EmbeddingExports(arena_bytes=int(sys.argv[1]), lease_s=float(sys.argv[2]))
    answer: Any
    for line in sys.stdin:
        match json.loads(line):
            case ["offer", seed, rows]:
                try:
                    answer = exports.offer(seed.to_bytes(32, "big"), share(embedding(seed, rows)), None).to_dict()
                except NoRoom as error:
                    answer = str(error)
            case ["held"]:
                exports.sweep()
                answer = [exports.leases, exports.leased_bytes, exports.expired]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
