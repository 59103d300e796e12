"""Expands a prompt to one placeholder per image row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtx.worker.loading import LoadedEngine
from trtx.worker.multimodal.images import expand
from trtx.worker.multimodal.media_loader import RequestMedia
from trtx.worker.multimodal.prompt_media_loader import PromptRequestMedia
from trtx.worker.requests import handoff
from trtx.worker.requests.invalid_request import InvalidRequest
from trtx.worker.requests.request import WorkerRequest, with_media, with_ready


async def with_images(
    parsed: WorkerRequest,
    media: RequestMedia | PromptRequestMedia,
    loaded: LoadedEngine,
    *,
    handed_over: Mapping[str, Any] | None,
    routing: Any,
) -> WorkerRequest:
    """``parsed`` with its prompt expanded for ``media``. Raises InvalidRequest and the errors of loading images.

    ``handed_over`` is the prefill worker's answer on a decode worker, or None. If it is set, the expansion comes from
    it and the images are not loaded. ``routing`` is the router's expansion of the same prompt.
    """
    context_length = loaded.engine.facts.context_length
    if isinstance(media, PromptRequestMedia):
        if handed_over is None:
            ready = await media.ready(parsed.token_ids)
            return with_ready(parsed, ready.token_ids, context_length=context_length, ready=ready)
        if (made := handoff.prompt_of(handed_over)) is None:
            raise InvalidRequest(
                "the prefill worker did not expand the prompt for its images; run the same version of trtx on both "
                "workers"
            )
        return with_ready(parsed, made, context_length=context_length)
    pictures = () if handed_over is None else handoff.pictures_of(handed_over)
    if len(pictures) != len(media):
        if handed_over is not None:
            raise InvalidRequest(
                f"the prefill worker expanded the prompt for {len(pictures)} media and the request has {len(media)}; "
                "run the same version of trtx on both workers"
            )
        pictures = await media.pictures()
    token_ids, ranges = expand(parsed.token_ids, media.config, pictures, loaded.encode_text)
    return with_media(parsed, token_ids, ranges, pictures=pictures, context_length=context_length, routing=routing)
