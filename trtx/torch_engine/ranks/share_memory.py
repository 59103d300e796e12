"""A rank other than 0 does what rank 0 asks of its memory, and hands its pool to other engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trtx.errors import UsageError
from trtx.torch_engine.handoff import create_transport, direct_offer
from trtx.torch_engine.handoff.codec import DirectOffer
from trtx.torch_engine.handoff.ranked import PartEnded
from trtx.torch_engine.ranks.host_copies import CopyEnded, FollowedCopies
from trtx.torch_engine.ranks.memory_requests import (
    CloseHostPool,
    OpenHostPool,
    ReadShare,
    ReleaseShare,
    RestoreShare,
    ShareDone,
    ShareRequest,
)
from trtx.torch_engine.ranks.part_reads import PartReads
from trtx.torch_engine.runner import TorchRunner
from trtx.torch_engine.runner.host_copies import create_host_copies, pools_of
from trtx.torch_engine.runner.runner_memory import NewWeights


class OfferedPool:
    """A rank's pool, which other engines read while it is open, and into which the rank then reads parts of theirs."""

    def __init__(self, runner: TorchRunner, report: Callable[[PartEnded], None]) -> None:
        self.parts: PartReads | None = None  # None: not open
        self._runner = runner
        self._report = report

    def open(self) -> DirectOffer:
        """Registers the pool. Raises UsageError if this process can't share memory."""
        transport = create_transport(self._runner.pool, self._runner.geometry, routes=("direct",))
        offer = direct_offer(transport)
        self.parts = PartReads(transport, self._report)
        return offer

    def close(self) -> None:
        """Deregisters the pool. No read may be under way."""
        if self.parts is not None:
            self.parts.close()
            self.parts = None


class ShareMemory:
    """Handles one :data:`ShareRequest` after the other, with no step in flight."""

    def __init__(self, runner: TorchRunner, pool: OfferedPool | None, report: Callable[[CopyEnded], None]) -> None:
        """``pool``: None if no KV is handed off. ``report``: called with each copy of the host tier that has ended."""
        self.copies: FollowedCopies | None = None  # None: no host tier
        self._runner = runner
        self._pool = pool
        self._report = report
        self._read: NewWeights | None = None

    def handle(self, request: ShareRequest) -> ShareDone:
        """Raises UsageError if the pool can't be offered again after it: this rank can't go on then."""
        try:
            reopens = self._do(request)
        except UsageError as error:
            return ShareDone(str(error))
        if not reopens or self._pool is None:
            return ShareDone()
        self._pool.close()
        return ShareDone(offer=self._pool.open())

    def _do(self, request: ShareRequest) -> bool:
        """Returns whether the pool must be offered anew."""
        if isinstance(request, ReleaseShare):
            if "kv_cache" in request.tags and self._pool is not None:
                self._pool.close()
            self._runner.release(request.tags)
            return False
        if isinstance(request, RestoreShare):
            self._runner.restore(request.tags)
            return "kv_cache" in request.tags
        if isinstance(request, ReadShare):
            self._read = self._runner.memory.read_weights(Path(request.model_dir))
            return False
        if isinstance(request, OpenHostPool):
            groups = len(self._runner.geometry.groups)
            copies = create_host_copies(pools_of(self._runner), request.num_bytes, groups)
            self.copies = FollowedCopies(copies, self._report)
            return False
        if isinstance(request, CloseHostPool):
            assert self.copies is not None
            self.copies.close()
            self.copies = None
            return False
        read, self._read = self._read, None
        if not request.replaces:
            return False
        assert read is not None
        self._runner.replace_weights(read)
        # The layout that engines compare before a handoff names the scales of a float8 pool.
        return self._pool is not None and self._pool.parts is not None
