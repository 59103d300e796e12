"""The content names of blocks: hashes of tokens, salt and media, equal in every process."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

NAME_BYTES = 32
"""A prefix hit compares names, never tokens, and clients choose their tokens.

So it must be infeasible to find two contents or two salts with the same name. 256 bits cost as much as 64: both fit in
the hash's 128-byte blocks.
"""
_ROOT = bytes(NAME_BYTES)
_WITH_MEDIA = b"media"


def root_name(cache_salt: str | None) -> bytes:
    """The parent name of a sequence's first block. Sequences with different salts share no block."""
    return _ROOT if cache_salt is None else blake2b(cache_salt.encode(), digest_size=NAME_BYTES).digest()


def block_name(parent: bytes, tokens: Sequence[int], media: bytes = b"") -> bytes:
    """Name of a full block: a hash of its tokens (32-bit ids) and of the preceding block's name, hence of all before.

    ``media``: identity of the media rows inside the block (:func:`trtx.torch_engine.core.media.media_identity`). Equal
    contents give equal names in every process and on every machine of the same byte order, so separate engines agree.
    """
    contents = parent + array("i", tokens).tobytes()
    if not media:
        return blake2b(contents, digest_size=NAME_BYTES).digest()
    # ``person``: the name differs from that of any text-only block.
    return blake2b(contents + media, digest_size=NAME_BYTES, person=_WITH_MEDIA).digest()
