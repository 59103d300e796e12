"""The encode role: images in, handles to their embeddings out, as JSON.

The embeddings stay on this worker's GPU; a handle is TensorRT-LLM's own serialised CUDA IPC handle, for one consumer
that sees the same GPU. Who sends the request decides what becomes of the answer: the 1.4.2 frontend asks no encoder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from dynamo.common.backend.multimodal import encoder_terminal_chunk

from trtx.engine import Engine
from trtx.engine.api import stated
from trtx.worker.chunks import Chunk
from trtx.worker.request import InvalidRequest

# Fields of DisaggregatedParams that prefill needs of an encoder's; the last two are both there or neither is.
_FIELDS = (
    "multimodal_embedding_handles",
    "multimodal_hashes",
    "mrope_position_ids_handle",
    "mrope_position_deltas_handle",
)


class ImageEncoder:
    """An engine's vision encoder behind requests of one prompt and its images."""

    def __init__(self, engine: Engine) -> None:
        # Dynamo 1.4.2's media loaders import torch: 1.5 s that a worker without images need not pay.
        from dynamo.common.multimodal.image_loader import ImageLoader

        self._engine = engine
        self._loader = ImageLoader()

    async def encode(self, wire: Mapping[str, Any], *, is_wanted: Callable[[], bool] = lambda: True) -> Chunk:
        """The terminal chunk: ``encoder_result`` holds the handles, and the token ids that the encoder was given.
        ``is_wanted`` makes no difference: the handles' memory is the engine's own business.

        ``wire`` is Dynamo's request with ``multi_modal_data: {"image_url": [{"Url": "data:… or http…"}]}``. Raises
        InvalidRequest for one without images, or with one that can't be loaded.
        """
        media = wire.get("multi_modal_data") or {}
        items = media.get("image_url") or []
        if others := sorted(kind for kind, held in media.items() if held and kind != "image_url"):
            raise InvalidRequest(f"the request brings {', '.join(others)}, expected images alone; send image_url")
        if not items:
            raise InvalidRequest("the request has no images; an encode worker takes multi_modal_data.image_url")
        token_ids = list(wire.get("token_ids") or ())
        try:
            images = await self._loader.load_image_batch(items)
        except Exception as error:
            raise InvalidRequest(f"an image can't be loaded: {error}") from error
        inputs = {"prompt_token_ids": token_ids, "multi_modal_data": {"image": images}, "mm_processor_kwargs": {}}
        try:
            params = await asyncio.to_thread(self._engine.encode, inputs)
        except ValueError as error:  # how the LLM API refuses an argument
            raise InvalidRequest(str(error)) from error
        held = {} if params is None else stated(params)
        found = {name: held[name] for name in _FIELDS if name in held}
        if "multimodal_embedding_handles" not in found:
            raise InvalidRequest("the encoder made nothing of these images; is this a model with a vision encoder?")
        chunk: Chunk = dict(encoder_terminal_chunk({**found, "prompt_token_ids": token_ids}))
        return chunk
