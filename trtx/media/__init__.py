"""What clients send besides text: fetched with care, decoded in processes of its own.

It owns which addresses and files a client may name, the limits on bytes, pixels and time, the pool of decoding
processes and the keys by content. It does not know requests, placeholders or encoders: ``trtx/worker`` does. Enter by
``fetch``, ``PicturePool`` and ``content_key``; every fault of a medium is a ``MediaError`` with an HTTP status. Always
holds: nothing of a file's content is parsed in the caller's process, or stands in a log or an error.
"""

from trtx.config.media import MediaField, MediaLimits, media_fields
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
    "MediaField",
    "MediaLimits",
    "PicturePool",
    "Prepared",
    "Stopping",
    "VideoRule",
    "content_key",
    "decode_seconds",
    "embedding_options",
    "fetch",
    "media_fields",
    "processor_options",
    "video_options",
]
