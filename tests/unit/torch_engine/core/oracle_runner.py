"""A runner whose KV cells hold (token, position), and whose next token is a hash of what it reads back.

Wrong block tables, positions, stale blocks or a prefix hit on other contents all change the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from trtx.torch_engine.batch import Batch, KvGeometry, Sampled
from trtx.torch_engine.handoff import FailedRead, FinishedRead, LayoutMismatch, PeerGone, TransportEvents

VOCAB = 97


def next_token(tokens: Sequence[int], salt: int = 0) -> int:
    """What an undisturbed model says after ``tokens``."""
    cells = list(zip(tokens, range(len(tokens)), strict=True))
    return int.from_bytes(blake2b(repr((cells, salt)).encode(), digest_size=4).digest(), "little") % VOCAB


def undisturbed(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class OracleRunner:
    def __init__(self, num_blocks: int, tokens_per_block: int = 4, max_position: int = 1000) -> None:
        self.geometry = KvGeometry(1, 1, 1, tokens_per_block, "float32")
        self.num_blocks = num_blocks
        self.max_position = max_position
        self.vocab_size = VOCAB
        self.pool: Any = None
        self.cells: list[list[tuple[int, int] | None]] = [[None] * tokens_per_block for _ in range(num_blocks)]
        self.slots: dict[int, list[int]] = {}  # slot -> the block list it was told of
        self.largest_batch = 0
        self.steps: list[tuple[int, int]] = []  # (decodes in form, prompt tokens)
        self.is_closed = False

    def execute(self, batch: Batch) -> list[Sampled]:
        size = self.geometry.tokens_per_block
        seen_prompt = False
        used: set[int] = set()
        results = []
        for s in batch.sequences:
            is_decode = len(s.new_token_ids) == 1 and s.samples and s.start > 0
            assert s.new_token_ids, "a share computes at least one token"
            assert not (is_decode and seen_prompt), "decodes come before prompt chunks"
            seen_prompt = seen_prompt or not is_decode
            assert s.slot not in used, "one share a slot"
            used.add(s.slot)
            if s.is_first:
                self.slots[s.slot] = s.block_ids
            assert self.slots[s.slot] is s.block_ids, "the block list stays the sequence's own while it holds the slot"
            for offset, token in enumerate(s.new_token_ids):
                position = s.start + offset
                self.cells[s.block_ids[position // size]][position % size] = (token, position)
        for s in batch.sequences:
            token = None
            if s.samples:
                end = s.start + len(s.new_token_ids)
                cells = [self.cells[s.block_ids[p // size]][p % size] for p in range(end)]
                digest = blake2b(repr((cells, 0)).encode(), digest_size=4).digest()
                token = int.from_bytes(digest, "little") % VOCAB
            results.append(Sampled(token))
        prompt_tokens = sum(len(s.new_token_ids) for s in batch.sequences)
        self.steps.append((len(batch.sequences), prompt_tokens))
        self.largest_batch = max(self.largest_batch, len(batch.sequences))
        return results

    def synchronize(self) -> None: ...

    def device_memory_bytes(self) -> int:
        return 0

    def close(self) -> None:
        self.is_closed = True


class Wire:
    """Joins the transports of several oracle engines in one process; reads end when ``deliver`` says so."""

    def __init__(self) -> None:
        self.ends: dict[str, OracleTransport] = {}


class OracleTransport:
    name = "oracle"

    def __init__(self, wire: Wire, name: str, runner: OracleRunner) -> None:
        self.wire, self.agent, self.runner = wire, name, runner
        wire.ends[name] = self
        self.exports: dict[int, list[int]] = {}
        self.reads: dict[int, tuple[str, int, list[tuple[int, int]]]] = {}
        self.events: dict[str, list[Any]] = {"finished": [], "failed": [], "released": []}
        self.is_dead = False
        self.fails_reads = False
        self.mismatches = False
        self.blocks_read = 0
        self._next = 0

    @property
    def pending_reads(self) -> int:
        return len(self.reads)

    def export(self, lease_id: int, block_ids: Sequence[int], num_tokens: int, deadline_s: float) -> bytes:
        self.exports[lease_id] = list(block_ids)
        return f"{self.agent}:{lease_id}".encode()

    def begin_read(self, opaque_state: bytes, positions: Sequence[int], local_ids: Sequence[int]) -> int:
        agent, lease = opaque_state.decode().split(":")
        if self.mismatches:
            raise LayoutMismatch("dtype is 'bfloat16' on prefill, 'float32' on decode")
        if self.wire.ends[agent].is_dead:
            raise PeerGone(f"{agent} is gone")
        self._next += 1
        self.reads[self._next] = (agent, int(lease), list(zip(positions, local_ids, strict=True)))
        return self._next

    def deliver(self) -> None:
        """Ends every pending read."""
        for read_id, (agent, lease, pairs) in self.reads.items():
            peer = self.wire.ends[agent]
            if self.fails_reads or peer.is_dead or lease not in peer.exports:
                self.events["failed"].append(FailedRead(read_id, "gone"))
                continue
            for index, local in pairs:
                self.runner.cells[local] = list(peer.runner.cells[peer.exports[lease][index]])
            self.blocks_read += len(pairs)
            self.events["finished"].append(FinishedRead(read_id, len(pairs) * 8, 0.001))
            peer._released(lease)
        self.reads.clear()

    def _released(self, lease: int) -> None:
        if self.exports.pop(lease, None) is not None:
            self.events["released"].append(lease)

    def poll(self) -> TransportEvents:
        taken = TransportEvents(**{name: tuple(values) for name, values in self.events.items()})
        for values in self.events.values():
            values.clear()
        return taken

    def release(self, opaque_state: bytes) -> None:
        agent, lease = opaque_state.decode().split(":")
        if not self.wire.ends[agent].is_dead:
            self.wire.ends[agent]._released(int(lease))

    def close(self) -> None: ...
