"""Sets up what a worker needs to take images, or to encode them for other workers."""

from __future__ import annotations

import importlib
import os
from contextlib import AsyncExitStack
from typing import Any

from trtx import engine
from trtx.checkpoint.vision import VisionConfig, read_vision_config
from trtx.config.video_decoder import decodes_videos
from trtx.engine import Engine
from trtx.engine.api import EmbeddingExports, remove_left
from trtx.errors import UsageError
from trtx.media import Kind, PicturePool, embedding_options, processor_options, video_options
from trtx.text import Tokenizer
from trtx.worker.left_files import LeftFiles
from trtx.worker.multimodal.decoding import Decoding
from trtx.worker.multimodal.embedders import Embedder, LocalEmbedder, StartedEmbedder, video_rule
from trtx.worker.multimodal.embedding_cache import EmbeddingCache
from trtx.worker.multimodal.embedding_encoder import EmbeddingEncoder, discard
from trtx.worker.multimodal.encode_endpoint import EncodeEndpoint
from trtx.worker.multimodal.handle_encoder import HandleEncoder
from trtx.worker.multimodal.images import Picture
from trtx.worker.multimodal.media_loader import MediaLoader
from trtx.worker.multimodal.media_metrics import MediaMetrics
from trtx.worker.multimodal.prompt_media_loader import PromptMediaLoader
from trtx.worker.multimodal.remote_embedder import RemoteEmbedder, encode_seconds
from trtx.worker.options import WorkerOptions

# upper bound for models whose rows depend on the image's size: the largest image that an encoder takes
_ROWS_OF_A_PICTURE = 16384
_BYTES_OF_A_NUMBER = 4  # upper bound


class MultimodalSetup:
    """The loader and the encoders of a worker, created before its engine is loaded and closed before the engine ends.

    ``media_loader`` is set for workers whose requests may contain images, ``encoder`` for encode workers, neither for
    text-only workers. ``metrics`` is None if neither is set.
    """

    def __init__(self, options: WorkerOptions) -> None:
        """Raises UsageError for a checkpoint whose images trtx can't read."""
        self.media_loader: MediaLoader | PromptMediaLoader | None = None
        self.encoder: HandleEncoder | EmbeddingEncoder | None = None
        self.metrics: MediaMetrics | None = None
        self._options = options
        self._api = engine.load(options.engine)
        takes_images = self._api.missing_media is not None
        self._config: VisionConfig | None = read_vision_config(options.model) if takes_images else None
        if self._config is not None:
            # Imported now: the first image would import them in the event loop and delay all other requests.
            importlib.import_module("numpy")
            importlib.import_module("trtx.media.http")
        self._local: StartedEmbedder | None = None
        self._exit = AsyncExitStack()

    async def before_engine(self) -> None:
        """Starts this worker's own encoder if its requests will need it. Raises UsageError.

        On a GPU, the encoder must allocate its memory before the engine, because the engine sizes its KV pool by what
        is free.
        """
        # the topology is on one machine
        if self._config is not None and os.environ.get("DYN_DISCOVERY_BACKEND") == "file":
            left = LeftFiles(remove_left)
            self._exit.push_async_callback(left.close)
            await left.begin()
        if self._config is None or self._options.role == "encode":
            return
        self.metrics = metrics = MediaMetrics()
        options, start = self._options, self._api.start_encoder
        assert start is not None, "an engine that takes embeddings makes them too"
        dtype = options.llm_args.get("dtype")
        config: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        if options.deterministic:
            config["max_batch_size"] = 1  # the batch's other images change the last bits of an embedding
        vision = self._config
        self._local = StartedEmbedder(
            lambda: LocalEmbedder.begin(options.model, config, start, options.media, metrics, vision=vision)
        )
        self._exit.push_async_callback(self._local.close)
        # A decode worker rarely needs an encoder, because it gets the KV of images that prefill encoded; with remote
        # encoders, encode workers do the work.
        if options.encoders == "local" and options.role != "decode":
            await self._local.start()

    async def with_engine(self, loaded: Engine, tokenizer: Tokenizer | None) -> None:
        """Sets ``media_loader`` or ``encoder``. ``tokenizer`` belongs to the worker's model. Raises UsageError."""
        options = self._options
        if options.role == "encode":
            await self._encode_with(loaded)
        elif loaded.facts.image_token_id is not None:
            await self._prompts_with(loaded, tokenizer)
        elif self._config is not None:
            assert self._local is not None and self.metrics is not None, "before_engine was called"
            embedder: Embedder = self._local
            if options.encoders == "remote":
                workers = await EncodeEndpoint.open(options.served_model_name)
                self._exit.callback(workers.close)
                embedder = RemoteEmbedder(
                    workers, self.metrics, fallback=self._local, seconds=encode_seconds(options.media)
                )
            cache: EmbeddingCache[Picture] = EmbeddingCache(
                options.embedding_cache_bytes, lambda key, _: loaded.drop_embeddings([key])
            )
            self._exit.push_async_callback(cache.close)
            self.metrics.cache = cache
            self.media_loader = MediaLoader(
                self._config,
                loaded,
                embedder,
                cache=cache,
                limits=options.media,
                metrics=self.metrics,
                model=str(options.model),
                options=_processing(options, self._config),
                reserved_bytes=self._reserved_bytes(self._config, loaded),
            )

    async def _encode_with(self, loaded: Engine) -> None:
        options = self._options
        if self._api.missing_media is None and loaded.facts.image_token_id is not None:
            self.metrics = MediaMetrics()
            self.encoder = HandleEncoder(loaded, self._decoding(self.metrics))
            return
        if self._config is None:
            raise UsageError(
                f"{options.model} is a text model, so an encode worker has nothing to do; use a model with images"
            )
        self.metrics = MediaMetrics()
        pool = PicturePool(options.model, options.media, videos=video_rule(self._config))
        await pool.start()
        self._exit.push_async_callback(pool.close)
        cache: EmbeddingCache[Any] = EmbeddingCache(options.embedding_cache_bytes, discard)
        self._exit.push_async_callback(cache.close)
        self.metrics.cache = cache
        embedder = LocalEmbedder(pool, loaded, self._config, self.metrics)
        exports = EmbeddingExports()
        self._exit.callback(exports.close)
        in_files = LocalEmbedder(pool, loaded, self._config, self.metrics, on_device=False)
        reserved = self._reserved_bytes(self._config, loaded)
        self.encoder = EmbeddingEncoder(embedder, cache, reserved, exports, in_files=in_files)

    async def _prompts_with(self, loaded: Engine, tokenizer: Tokenizer | None) -> None:
        """Sets ``media_loader`` for an engine that preprocesses images itself, with its own tower or encode workers'
        handles.
        """
        options, workers = self._options, None
        if options.encoders == "remote":
            if not loaded.facts.takes_handles:
                raise UsageError(
                    f"{options.model} can't be served with encode workers by this engine: its model's input processor "
                    "takes no embeddings of another process (support_mm_disagg); leave --encode out"
                )
            workers = await EncodeEndpoint.open(options.served_model_name)
            self._exit.callback(workers.close)
        self.metrics = MediaMetrics()
        self.media_loader = PromptMediaLoader(
            loaded,
            self._decoding(self.metrics),
            tokenizer=tokenizer,
            workers=workers,
            limits=options.media,
            metrics=self.metrics,
        )

    def _decoding(self, metrics: MediaMetrics) -> Decoding:
        pool = PicturePool(None, self._options.media)
        self._exit.push_async_callback(pool.close)
        return Decoding(pool, metrics)

    def _reserved_bytes(self, config: VisionConfig, loaded: Engine) -> int:
        """Cache bytes to reserve for one image's embedding.

        This is the largest size that the embedding can have, capped so that a request with the maximum number of images
        fits. If the size depends on the image, it is known only once the embedding is made.
        """
        rows = config.tokens_per_image or min(_ROWS_OF_A_PICTURE, loaded.facts.context_length)
        largest = rows * config.columns * _BYTES_OF_A_NUMBER
        return min(largest, self._options.embedding_cache_bytes // max(1, self._options.media.max_images))

    async def close(self) -> None:
        """Ends everything that this object started, but not the engine. Idempotent."""
        self.media_loader = self.encoder = None
        await self._exit.aclose()


def _processing(options: WorkerOptions, config: VisionConfig) -> dict[Kind, str]:
    """For each media kind that the model takes, the settings that determine the result of preprocessing."""
    found: dict[Kind, str] = {"image": processor_options(options.model), "embedding": embedding_options()}
    if config.video_token_id is not None and decodes_videos():
        found["video"] = video_options(options.model, options.media.max_video_frames)
    return found
