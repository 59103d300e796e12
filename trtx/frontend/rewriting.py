"""Puts the token ids of prompts into request bodies, so that Dynamo's frontend neither renders nor tokenizes them.

A chat request keeps its messages, because Dynamo validates them and passes their images on, and gets
``nvext.token_data``. The text prompts of a completion request are replaced by token ids. Bodies that this module does
not understand are passed on unchanged: Dynamo refuses them, or a worker does (``trtx.worker.multimodal.audio_guard``).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from trtx.frontend.responses_input import chat_of_responses
from trtx.prompts.files import PROMPT_END
from trtx.prompts.rendering import PromptMaker, Unrenderable

CHAT, COMPLETIONS, RESPONSES = PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


_OPENS_THINKING = re.compile(r"(<[a-z:]*think>|\[THINK\])\s*\Z")


def rewrite(maker: PromptMaker, path: str, body: bytes) -> bytes:
    """The body of a POST to one of :data:`PATHS` with its prompt as token ids. Raises Unrenderable."""
    try:
        request = json.loads(body, strict=False, object_pairs_hook=each_once)
    except UnicodeDecodeError as error:
        raise Unrenderable(
            f"the body is not {error.encoding.upper()} at byte {error.start}: {error.reason}; send JSON in UTF-8"
        ) from error
    except (ValueError, RecursionError):
        return body
    if not isinstance(request, dict) or _has_token_data(request):
        return body
    try:
        changed = _completion(maker, request) if path == COMPLETIONS else _chat(maker, path, request)
        return body if changed is None else json.dumps(changed, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise Unrenderable(
            f"the request can't be rendered to a prompt ({' '.join(str(error).split())[:200]}); correct the types of "
            "its messages, tools or prompt, and remove lone surrogates"
        ) from error


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The JSON object of ``pairs``. Raises Unrenderable for a name that occurs twice.

    Python would keep the last value alone, and Dynamo, which refuses such a body, would not see the others.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise Unrenderable(f"the body has the field {json.dumps(twice[:60])} twice in one object; send it once")
    return found


def _completion(maker: PromptMaker, request: dict[str, Any]) -> dict[str, Any] | None:
    prompt = request.get("prompt")
    if isinstance(prompt, str):
        return {**request, "prompt": maker.of_text(prompt)}
    if isinstance(prompt, list) and prompt and all(isinstance(one, str) for one in prompt):
        return {**request, "prompt": [maker.of_text(one) for one in prompt]}
    return None


def _chat(maker: PromptMaker, path: str, request: dict[str, Any]) -> dict[str, Any] | None:
    chat = chat_of_responses(request) if path == RESPONSES else request
    if chat is None:
        return None
    messages = chat.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        return None
    refuse_audio(messages)
    nvext = request.get("nvext") or {}
    prompt = maker.rendered(chat)
    changed = {**request, "nvext": {**nvext, "token_data": maker.of_rendered(prompt)}}
    if path == CHAT and (mark := open_thinking(prompt)) is not None:
        field = (
            "chat_template_args" if "chat_template_args" in request else "chat_template_kwargs"
        )  # one field for Dynamo
        changed[field] = {**(request.get(field) or {}), PROMPT_END: mark}
    return changed


def open_thinking(prompt: str) -> str | None:
    """The mark, such as ``<think>``, with which a prompt ends if its template begins the reasoning; else None.

    The answer to such a prompt contains only the end mark. To parse it, Dynamo 1.6.1 looks for the begin mark at the
    end of the prompt that it renders itself. So the template that trtx's workers register ends with :data:`PROMPT_END`.
    """
    found = _OPENS_THINKING.search(prompt)
    return None if found is None else found[1]


def refuse_audio(messages: list[dict[str, Any]]) -> None:
    """Raises Unrenderable for audio, which Dynamo 1.6.1 would silently drop."""
    for message in messages:
        parts = message.get("content")
        kinds = [part.get("type") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        if "input_audio" in kinds:
            raise Unrenderable(
                "the request contains input_audio, which no model takes here, expected text or images; send a "
                "transcript as text"
            )


def _has_token_data(request: Mapping[str, Any]) -> bool:
    nvext = request.get("nvext")
    if nvext is None:
        return False
    return not isinstance(nvext, dict) or nvext.get("token_data") is not None
