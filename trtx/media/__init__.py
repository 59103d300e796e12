"""Fetches clients' media safely and decodes them in separate processes.

Owns the rules for addresses and files that a client may name, the limits on bytes, pixels and time, the pool of
decoding processes, and the keys by content. Does not know requests, placeholders or encoders: ``trtx/worker`` does.
Entry points: ``fetch.fetch``, ``PicturePool`` and ``content_key``; every fault of a media item is a ``MediaError`` with
an HTTP status. Always holds: the caller's process never parses a file's content, and no log or error contains any of
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trtx.config.media import MediaLimits
    from trtx.ipc.encoder_messages import Clip, Grid
    from trtx.media.blob import Blob, Kind
    from trtx.media.errors import THIS_PICTURE, MediaError, Stopping
    from trtx.media.held import HeldMedia
    from trtx.media.keys import content_key, embedding_options, processor_options, video_options
    from trtx.media.messages import VideoRule
    from trtx.media.pool import GivenEmbedding, PicturePool, Prepared, decode_seconds

_HOMES = {
    "MediaLimits": "config.media", "Clip": "ipc.encoder_messages", "Grid": "ipc.encoder_messages",
    "Blob": "media.blob", "Kind": "media.blob", "THIS_PICTURE": "media.errors", "MediaError": "media.errors",
    "Stopping": "media.errors", "HeldMedia": "media.held", "content_key": "media.keys",
    "embedding_options": "media.keys", "processor_options": "media.keys", "video_options": "media.keys",
    "VideoRule": "media.messages", "GivenEmbedding": "media.pool", "PicturePool": "media.pool",
    "Prepared": "media.pool", "decode_seconds": "media.pool",
}  # fmt: skip
__all__ = [
    "THIS_PICTURE",
    "Blob",
    "Clip",
    "GivenEmbedding",
    "Grid",
    "HeldMedia",
    "Kind",
    "MediaError",
    "MediaLimits",
    "PicturePool",
    "Prepared",
    "Stopping",
    "VideoRule",
    "content_key",
    "decode_seconds",
    "embedding_options",
    "processor_options",
    "video_options",
]


def __getattr__(name: str) -> object:
    """Imports a name on first access: a decoding process imports this package too, and needs little of it."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"trtx.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
