"""A runner whose KV cells hold (token, position), and whose next token is a hash of what it reads back.

In place of a placeholder's token a cell holds the row that the sequence has for it.

Wrong block tables, positions, stale blocks or a prefix hit on other contents all change the tokens. So does a block
that is given away too early: its device is as late as one can be, and does a step when its results are asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trtx.torch_engine.handoff import FailedRead, FinishedRead, LayoutMismatch, PeerGone, TransportEvents
from trtx.torch_engine.kv_layout import KvGeometry, LayerGroup
from trtx.torch_engine.messages import SharedCopy
from trtx.torch_engine.ranks.host_copies import CopyEnded, CopyOrder, FollowedCopies
from trtx.torch_engine.step import FROM_SLOT, Batch, ExpertBalance, LogitsEdit, Sampled

VOCAB = 97


FULL: tuple[int | None, ...] = (None,)


def next_token(tokens: Sequence[Any], windows: Sequence[int | None] = FULL) -> int:
    """What an undisturbed model says after ``tokens``, of which each layer group sees a window."""
    cells = list(zip(tokens, range(len(tokens)), strict=True))
    return _said([cells if window is None else cells[-window:] for window in windows])


def _said(seen: list[Any], salt: int = 0, among: Sequence[int] = range(VOCAB)) -> int:
    number = int.from_bytes(blake2b(repr((*seen, salt)).encode(), digest_size=4).digest(), "little")
    return among[number % len(among)]


def undisturbed(prompt: Sequence[Any], count: int, windows: Sequence[int | None] = FULL) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, windows=windows))
    return tokens[len(prompt) :]


@dataclass
class Row:
    """What the device was told of one share of a step."""

    slot: int
    tokens: list[Any]
    start: int
    blocks: list[list[int]]  # of each layer group
    samples: bool
    banned: tuple[int, ...] = ()
    is_processed: bool = False
    num_drafts: int = 0  # guesses at the end of the tokens
    allowed: list[int] | None = None  # by logits processors and a grammar; None: every token


class OracleStep:
    def __init__(self, runner: OracleRunner, rows: list[Row]) -> None:
        self.runner, self.rows = runner, rows
        self.must_sample = False  # by a call of ``sample``, before results are asked for
        self.waits_for: list[OracleCopy] = []  # copies that end before the step begins

    def sample(self, slots: Sequence[int] = (), edit: LogitsEdit | None = None, masks_per_slot: int = 1) -> None:
        """A logits processor may exclude tokens; all others are equally likely here."""
        assert self.must_sample, "only a step that waits for tokens samples apart, and once"
        assert self.runner.queue[0] is self, "the step before is committed: masks and processors depend on its tokens"
        self.must_sample = False
        masks = self.runner.masks
        assert masks_per_slot == 1, "the oracle's guided sequences have no guesses"
        logits = {row.slot: torch.zeros(1, 1, VOCAB) for row in self.rows if row.is_processed and row.samples}
        if edit is not None:
            edit(logits, None)
        for row in self.rows:
            if row.slot in logits:
                row.allowed = logits[row.slot].isfinite().flatten().nonzero().flatten().tolist()
            if row.slot in slots:
                assert row.samples and masks is not None
                mask = masks[list(slots).index(row.slot)]
                allowed = np.unpackbits(mask.view(np.uint8), count=VOCAB, bitorder="little").nonzero()[0].tolist()
                among = range(VOCAB) if row.allowed is None else row.allowed
                row.allowed = [token for token in allowed if token in among and token not in row.banned]

    def results(self) -> list[Sampled]:
        assert self.runner.queue.popleft() is self, "results are asked for once, in the order of launches"
        assert not self.must_sample
        for copy in self.waits_for:
            copy.finish()
        return self.runner.compute(self.rows)


class OracleRunner:
    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int = 4,
        max_position: int = 1000,
        bad_token: int | None = None,
        windows: Sequence[int | None] = FULL,
        masks: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Instead of ``bad_token`` a sequence gets an error. ``windows``: of each layer group."""
        groups = tuple(LayerGroup((layer,), 1, 1, window) for layer, window in enumerate(windows))
        self.geometry = KvGeometry(groups, tokens_per_block, "float32")
        self.windows = windows
        self.num_blocks = num_blocks
        self.max_position = max_position
        self.vocab_size = VOCAB
        self.needs_grids = False
        self.is_asynchronous = True
        self.graph_misses: int | None = None
        self.expert_balance: ExpertBalance | None = None
        self.shared_weights: SharedCopy | None = None
        self.masks = masks
        self.pool: Any = None
        self.bad_token = bad_token
        self.cells: list[list[tuple[Any, int] | None]] = [[None] * tokens_per_block for _ in range(num_blocks)]
        self.slots: dict[int, list[list[int]]] = {}  # slot -> the block lists it was told of
        self.last_tokens: dict[int, int] = {}  # of slots
        self.queue: deque[OracleStep] = deque()  # launched, results not asked for
        self.largest_batch = 0
        self.most_queued = 0
        self.steps: list[tuple[int, int]] = []  # (decodes in form, prompt tokens)
        self.is_closed = False
        self.held_by: list[OracleCopy] = []  # copies that later steps wait for

    def launch(self, batch: Batch) -> OracleStep:
        assert len(self.queue) <= 1, "one step at most is under way when the next one is launched"
        seen_prompt = False
        used: set[int] = set()
        rows = []
        for s in batch.sequences:
            is_decode = len(s.new_token_ids) == 1 and s.samples and s.start > 0 and not s.embeddings
            assert s.new_token_ids, "a share computes at least one token"
            assert FROM_SLOT not in s.new_token_ids or (is_decode and not s.is_first)
            assert not (is_decode and seen_prompt), "decodes come before prompt chunks"
            seen_prompt = seen_prompt or not is_decode
            assert s.slot not in used, "one share a slot"
            used.add(s.slot)
            if s.is_first:
                self.slots[s.slot] = s.block_ids
            assert self.slots[s.slot] is s.block_ids, "the block list stays the sequence's own while it holds the slot"
            tokens: list[Any] = list(s.new_token_ids)
            for part in s.embeddings:
                end = part.first + part.count
                tokens[part.offset : part.offset + part.count] = part.embedding.tensor[part.first : end]
            blocks = [list(ids) for ids in s.block_ids]
            rows.append(Row(s.slot, tokens, s.start, blocks, s.samples, s.banned_ids, s.is_processed, s.num_drafts))
        self.steps.append((len(rows), sum(len(row.tokens) for row in rows)))
        self.largest_batch = max(self.largest_batch, len(rows))
        step = OracleStep(self, rows)
        step.must_sample = batch.waits_for_tokens
        step.waits_for = list(self.held_by)
        self.queue.append(step)
        self.most_queued = max(self.most_queued, len(self.queue))
        return self.queue[-1]

    def compute(self, rows: list[Row]) -> list[Sampled]:
        size = self.geometry.tokens_per_block
        for row in rows:
            for offset, token in enumerate(row.tokens):
                position = row.start + offset
                known = self.last_tokens[row.slot] if token == FROM_SLOT else token
                for blocks in row.blocks:
                    self.cells[blocks[position // size]][position % size] = (known, position)
        results = []
        for row in rows:
            if not row.samples:
                results.append(Sampled(None))
                continue
            end = row.start + len(row.tokens)
            first, *later = [self._sampled(row, known) for known in range(end - row.num_drafts, end + 1)]
            first.after_drafts = later
            results.append(first)
        return results

    def _sampled(self, row: Row, end: int) -> Sampled:
        """What is sampled after the first ``end`` tokens."""
        size = self.geometry.tokens_per_block
        starts = [0 if window is None else max(0, end - window) for window in self.windows]
        if row.allowed == []:
            self.last_tokens[row.slot] = 0
            return Sampled(None, error="no token")
        token = _said(
            [
                [self.cells[blocks[p // size]][p % size] for p in range(start, end)]
                for blocks, start in zip(row.blocks, starts, strict=True)
            ],
            among=range(VOCAB) if row.allowed is None else row.allowed,
        )
        is_bad = token == self.bad_token
        self.last_tokens[row.slot] = 0 if is_bad else token
        return Sampled(None, error="no number") if is_bad else Sampled(token)

    def load_embedding(self, shared: Any) -> Any:
        raise AssertionError("the core asks for none: the thread that reads its socket does")

    def device_memory_bytes(self) -> int:
        return 0

    def close(self) -> None:
        self.is_closed = True


class OracleCopy:
    """Copies of cells that happen as late as they may: when something waits for them, or ``polls`` polls later."""

    def __init__(self, pairs: list[tuple[list[Any], list[Any]]], polls: int, after: list[OracleCopy]) -> None:
        self.pairs, self.polls, self.after = pairs, polls, after
        self.is_finished = False
        self.seconds = 0.001

    def finish(self) -> None:
        if not self.is_finished:
            for copy in self.after:
                copy.finish()
            for source, target in self.pairs:
                target[:] = source
            self.is_finished = True

    def is_done(self) -> bool:
        self.polls -= 1
        if self.polls <= 0:
            self.finish()
        return self.is_finished


class OracleCopies:
    """Host memory beside an oracle's cells. ``delay`` gives the polls that the next copy takes."""

    block_bytes = bytes_of_all_ranks = 8

    def __init__(self, runner: OracleRunner, num_blocks: int, delay: Callable[[], int] = lambda: 1) -> None:
        self.runner, self.num_blocks, self.delay = runner, num_blocks, delay
        size = runner.geometry.tokens_per_block
        self.cells: list[list[tuple[Any, int] | None]] = [[None] * size for _ in range(num_blocks)]
        self.stores: list[OracleCopy] = []
        self.num_loaded = 0
        self.is_closed = False
        self.loads_at_once = False

    def store(self, device_ids: Sequence[int], host_ids: Sequence[int]) -> OracleCopy:
        pairs = [(self.runner.cells[d], self.cells[h]) for d, h in zip(device_ids, host_ids, strict=True)]
        self.stores = [copy for copy in self.stores if not copy.is_finished]
        self.stores.append(OracleCopy(pairs, self.delay(), list(self.stores)))
        return self.stores[-1]

    def load(self, host_ids: Sequence[int], device_ids: Sequence[int], *, after_stores: bool) -> OracleCopy:
        pairs = [(self.cells[h], self.runner.cells[d]) for h, d in zip(host_ids, device_ids, strict=True)]
        self.num_loaded += len(pairs)
        copy = OracleCopy(pairs, self.delay(), list(self.stores) if after_stores else [])
        if self.loads_at_once:
            copy.finish()
        return copy

    def hold_steps(self) -> None:
        self.runner.held_by = [copy for copy in self.stores if not copy.is_finished]

    def wait_for_stores(self) -> None:
        for copy in self.stores:
            copy.finish()

    def close(self) -> None:
        self.is_closed = True


class LedStep:
    """A step of two ranks, which must see the same in their cells."""

    def __init__(self, own: OracleStep, other: OracleStep) -> None:
        self.own, self.other = own, other

    def sample(self, slots: Sequence[int] = (), edit: LogitsEdit | None = None, masks_per_slot: int = 1) -> None:
        raise AssertionError("no sequence here waits for tokens")

    def results(self) -> list[Sampled]:
        found, same = self.own.results(), self.other.results()
        assert [one.token_id for one in found] == [one.token_id for one in same], "the ranks' cells differ"
        return found


class LeadingOracle(OracleRunner):
    """Rank 0 of two: another oracle repeats each step in cells of its own."""

    def __init__(self, num_blocks: int, *, bad_token: int | None = None, windows: Sequence[int | None] = FULL) -> None:
        super().__init__(num_blocks, bad_token=bad_token, windows=windows)
        self.other = OracleRunner(num_blocks, bad_token=bad_token, windows=windows)

    def launch(self, batch: Batch) -> LedStep:  # type: ignore[override]
        return LedStep(super().launch(batch), self.other.launch(batch))


class OracleRank:
    """The other rank's end of the host tier: copies at its own pace between its own cells."""

    def __init__(self, copies: OracleCopies) -> None:
        self.ended: list[CopyEnded] = []
        self.followed = FollowedCopies(copies, self.ended.append)

    def order_copy(self, order: CopyOrder) -> None:
        self.followed.do(order)

    def take_copies(self) -> list[CopyEnded]:
        self.followed.report()
        found, self.ended[:] = list(self.ended), []
        return found


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
        self.exported: dict[int, list[Any]] = {}  # what was in their cells then
        self.reads: dict[int, tuple[str, int, list[tuple[int, int]]]] = {}
        self.events: dict[str, list[Any]] = {"finished": [], "failed": [], "released": []}
        self.is_dead = False
        self.fails_reads = False
        self.given_back: set[tuple[str, int]] = set()  # peers' leases that this end has released
        self.copies_at_once = False  # when a read begins; else when it is delivered. A real one does in between
        self.mismatches = False
        self.corrupts = False  # says so of each read, as a planted fault does
        self.blocks_read = 0
        self._next = 0

    @property
    def pending_reads(self) -> int:
        return len(self.reads)

    def export(self, lease_id: int, block_ids: Sequence[int], num_tokens: int, deadline_s: float) -> bytes:
        self.exports[lease_id] = list(block_ids)
        self.exported[lease_id] = [list(self.runner.cells[block]) for block in block_ids]
        return f"{self.agent}:{lease_id}".encode()

    def begin_read(self, opaque_state: bytes, positions: Sequence[int], local_ids: Sequence[int]) -> int:
        agent, lease = opaque_state.decode().split(":")
        if self.mismatches:
            raise LayoutMismatch("dtype is 'bfloat16' on prefill, 'float32' on decode")
        if self.wire.ends[agent].is_dead:
            raise PeerGone(f"{agent} is gone")
        assert (agent, int(lease)) not in self.given_back, f"lease {lease} of {agent} ended: its blocks are another's"
        self._next += 1
        self.reads[self._next] = (agent, int(lease), list(zip(positions, local_ids, strict=True)))
        if self.copies_at_once and int(lease) in self.wire.ends[agent].exports:
            self._copy(*self.reads[self._next])
        return self._next

    def _copy(self, agent: str, lease: int, pairs: list[tuple[int, int]]) -> None:
        peer = self.wire.ends[agent]
        for index, local in pairs:
            found = peer.runner.cells[peer.exports[lease][index]]
            assert found == peer.exported[lease][index], "written to after it was exported"
            self.runner.cells[local] = list(found)

    def deliver(self) -> None:
        """Ends every pending read."""
        for read_id, (agent, lease, pairs) in self.reads.items():
            peer = self.wire.ends[agent]
            if self.fails_reads or peer.is_dead or lease not in peer.exports:
                self.events["failed"].append(FailedRead(read_id, "gone"))
                continue
            if not self.copies_at_once:
                self._copy(agent, lease, pairs)
            self.blocks_read += len(pairs)
            self.events["finished"].append(FinishedRead(read_id, len(pairs) * 8, 0.001, self.corrupts))
            self.given_back.add((agent, lease))
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
        self.given_back.add((agent, int(lease)))
        if not self.wire.ends[agent].is_dead:
            self.wire.ends[agent]._released(int(lease))

    def close(self) -> None: ...
