"""What rank 0 asks of another rank's memory between two steps, and the answer. Imports no torch."""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtx.torch_engine.messages import MemoryTag

if TYPE_CHECKING:
    from trtx.torch_engine.handoff.codec import DirectOffer

MEMORY = struct.pack("=i", -2)
"""The beginning of a frame with a :data:`ShareRequest`, pickled. A plan begins with its number of sequences."""


@dataclass(frozen=True, slots=True)
class ReleaseShare:
    """Release the rank's share of the memory."""

    tags: Collection[MemoryTag]


@dataclass(frozen=True, slots=True)
class RestoreShare:
    """Allocate the rank's share of released memory again."""

    tags: Collection[MemoryTag]


@dataclass(frozen=True, slots=True)
class ReadShare:
    """Read the rank's share of a checkpoint's weights into host memory, and check it. Nothing changes yet."""

    model_dir: str


@dataclass(frozen=True, slots=True)
class EndUpdate:
    """Replace the weights by the share that was read last, or drop that share."""

    replaces: bool


@dataclass(frozen=True, slots=True)
class OpenHostPool:
    """Allocate ``num_bytes`` of host memory for the rank's evicted blocks."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class CloseHostPool:
    """Give that memory back, once all copies are done."""


ShareRequest = ReleaseShare | RestoreShare | ReadShare | EndUpdate | OpenHostPool | CloseHostPool


@dataclass(frozen=True, slots=True)
class ShareDone:
    """A rank's answer to each request."""

    problem: str = ""  # why the request could not be done; the rank's memory is as before
    offer: DirectOffer | None = None  # how other engines read its pool from now on, if that has changed
