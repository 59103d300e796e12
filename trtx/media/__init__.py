"""Fetches clients' media safely and decodes them in separate processes.

Owns the rules for addresses and files that a client may name, the limits on bytes, pixels and time, the pool of
decoding processes, and the keys by content. Does not know requests, placeholders or encoders: ``trtx/worker`` does.
Entry points: ``fetch``, ``PicturePool`` and ``content_key``; every fault of a media item is a ``MediaError`` with an
HTTP status. Always holds: the caller's process never parses a file's content, and no log or error contains any of it.
"""

from trtx.config.media import MediaLimits
from trtx.ipc.encoder_messages import Clip, Grid
from trtx.media.blob import Blob, Kind
from trtx.media.errors import THIS_PICTURE, MediaError, Stopping
from trtx.media.fetch import fetch
from trtx.media.held import HeldMedia
from trtx.media.keys import content_key, embedding_options, processor_options, video_options
from trtx.media.messages import VideoRule
from trtx.media.pool import GivenEmbedding, PicturePool, Prepared, decode_seconds

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
    "fetch",
    "processor_options",
    "video_options",
]
