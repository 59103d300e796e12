"""Reads the prompt of a request: text, token ids or a dict, and the placeholder ranges of its media."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtx.checkpoint.vision import VisionConfig
from trtx.text import Tokenizer
from trtx.torch_engine.llmapi.media import PromptMedia, read_media
from trtx.torch_engine.llmapi.request_errors import RequestError, typed
from trtx.torch_engine.llmapi.sampling import SamplingParams
from trtx.torch_engine.llmapi.values import is_text, shown
from trtx.torch_engine.messages import Handoff, MediaSpan

Prompt = str | list[int] | Mapping[str, Any]


class PromptReader:
    """Knows the model's tokenizer, None with ``skip_tokenizer_init``, and its vision config, None for text models."""

    def __init__(self, tokenizer: Tokenizer | None, vision: VisionConfig | None) -> None:
        self._tokenizer = tokenizer
        self._vision = vision

    def read(self, inputs: Prompt, sampling: SamplingParams) -> tuple[str | None, list[int], PromptMedia]:
        """Returns the prompt's text if it is text, its token ids, and its media with embeddings."""
        text: str | None = None
        said: Mapping[str, Any] = {}
        if isinstance(inputs, Mapping):
            said = inputs
            text, inputs = inputs.get("prompt"), inputs.get("prompt_token_ids") or inputs.get("prompt") or []
        if isinstance(inputs, str):
            text = inputs
            if self._tokenizer is None:
                raise ValueError("inputs are text and skip_tokenizer_init is set; pass token ids")
            if not is_text(text):
                raise RequestError(f"the prompt is {shown(text)}, with surrogates; expected Unicode text or token ids")
            token_ids = list(self._tokenizer.encode(inputs, add_special_tokens=sampling.add_special_tokens).ids)
        elif isinstance(inputs, (list, tuple)):
            token_ids = typed(list[int], inputs, "the prompt")
        else:
            raise RequestError(f"inputs are {shown(inputs)}; expected text, a list of token ids, or a dict with either")
        if sampling.truncate_prompt_tokens is not None:
            token_ids = token_ids[-sampling.truncate_prompt_tokens :]
        token_ids, media = read_media(said, token_ids, self._vision)
        return text, token_ids, media

    def spans(self, stated: Sequence[MediaSpan], found: PromptMedia, handoff: Handoff | None) -> list[MediaSpan]:
        """Returns the media ranges from the caller, the prompt's embeddings or the handoff.

        If several of these have ranges, they must agree.
        """
        handed = handoff.media if handoff is not None and handoff.request_type == "generation_only" else None
        places: list[list[MediaSpan]] = [
            typed(list[MediaSpan], one, "media") for one in (stated, found.spans, handed or ())
        ]
        spans = next((one for one in places if one), [])
        if any(one and one != spans for one in places):
            raise RequestError(
                "the prompt's media differ from the media that prefill got, or are given twice; give them once"
            )
        if spans and self._vision is None:
            raise RequestError("the request has media, and the model is a text model; send text alone")
        return spans
