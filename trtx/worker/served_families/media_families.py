"""Metric families of images and of the embedding cache."""

from __future__ import annotations

from functools import partial

from trtx.engine.served_family import ServedFamily, recorded

_IMAGES = "for a model with images"
_CACHE = "for a model with images, if the worker caches embeddings"

FAMILIES: dict[str, ServedFamily] = {}
_family = partial(recorded, FAMILIES)

CACHE_LOOKUPS = _family(
    "counter",
    "trtx_embedding_cache_lookups_total",
    "images",
    "Images that requests asked for, by outcome: hit, joined (in progress for another request) or miss.",
    "outcome",
    when=_CACHE,
)
CACHE_EVICTIONS = _family(
    "counter", "trtx_embedding_cache_evictions_total", "embeddings", "Embeddings that made room.", when=_CACHE
)
CACHE_BYTES = _family("gauge", "trtx_embedding_cache_bytes", "bytes", "Bytes of embeddings held.", when=_CACHE)
CACHE_PINNED_BYTES = _family(
    "gauge",
    "trtx_embedding_cache_pinned_bytes",
    "bytes",
    "Bytes of embeddings that open requests use, or that are being made.",
    when=_CACHE,
)
CACHE_EMBEDDINGS = _family("gauge", "trtx_embedding_cache_pictures", "embeddings", "Embeddings held.", when=_CACHE)
MEDIA_SECONDS = _family(
    "counter", "trtx_media_seconds_total", "seconds", "Time that images took, by stage.", "stage", when=_IMAGES
)
MEDIA_IMAGES = _family(
    "counter", "trtx_media_pictures_total", "images", "Images that passed, by stage.", "stage", when=_IMAGES
)
MEDIA_OPEN = _family(
    "gauge",
    "trtx_media_open_calls",
    "calls",
    "Calls in progress, by stage; those of stage encode wait for the encoder or are in its batch.",
    "stage",
    when=_IMAGES,
)
ENCODER_RETRIES = _family(
    "counter", "trtx_encoder_retries_total", "calls", "Calls made again at another encode worker.", when=_IMAGES
)
ENCODER_FALLBACKS = _family(
    "counter",
    "trtx_encoder_fallbacks_total",
    "images",
    "Images encoded in this worker because no encode worker answered.",
    when=_IMAGES,
)
