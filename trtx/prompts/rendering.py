"""Converts a request to the token ids of its prompt, as transformers does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trtx.errors import TrtxError, UsageError
from trtx.prompts.content_forms import ContentForms
from trtx.prompts.formats import NO_TOOLS, reads_tools
from trtx.text import fast_tokenizer, load_hf_tokenizer

_MEDIA = {"image_url": "image", "video_url": "video"}
_OWN = ("add_generation_prompt", "continue_final_message", "documents")
_RESERVED = frozenset({"messages", "tools", "conversation", "chat_template", "tokenize", "padding", "truncation"}) | {
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
    "sanitize_control_tokens",
}  # fmt: skip
"""Arguments of transformers' ``apply_chat_template`` that are not template variables."""


_LONG_CHARACTERS = 1 << 18
"""Prompts below are encoded without a look at the context, which costs a read of discovery."""
_CHARACTERS_PER_TOKEN = 16  # more than prose or code has, so that the first look decides


class Unrenderable(TrtxError):
    """The model's chat template can't render the request, or the prompt is far too long.

    The message is shown to the client.
    """


class PromptMaker:
    """Makes prompts with one checkpoint's tokenizer. All methods may be called from several threads."""

    def __init__(self, model: Path, template: str | None = None, read_context: Callable[[], int] = lambda: 0) -> None:
        """Imports transformers, which takes seconds. ``template`` replaces the checkpoint's chat template.

        ``read_context``: returns how many tokens of prompt and output a worker holds, 0 if that is unknown.

        Raises UsageError if transformers can't load the tokenizer.
        """
        try:
            self._tokenizer = load_hf_tokenizer(model)
            self._backend = fast_tokenizer(self._tokenizer)
        except Exception as error:  # transformers raises errors of many classes
            raise UsageError(
                f"transformers can't load the tokenizer of {model} ({str(error)[:300]}); download the checkpoint again"
            ) from error
        if template is not None:
            self._tokenizer.chat_template = template
        self.has_template = bool(self._tokenizer.chat_template)
        self._read_context = read_context
        self._shows_tools = _shows_tools(self._tokenizer.chat_template)
        self._forms = ContentForms()

    def of_text(self, text: str) -> list[int]:
        """Token ids of a completion's prompt, including the special tokens that the tokenizer adds.

        Raises Unrenderable for a text of more than twice the context.
        """
        return self._ids(text, adds_special_tokens=True)

    def of_rendered(self, text: str) -> list[int]:
        """Token ids of a prompt from :meth:`rendered`, whose template writes the special tokens itself.

        Raises Unrenderable for a text of more than twice the context.
        """
        return self._ids(text, adds_special_tokens=False)

    def _ids(self, text: str, *, adds_special_tokens: bool) -> list[int]:
        if len(text) > _LONG_CHARACTERS:
            self._refuse_beyond_context(text)
        # ``encode`` holds the GIL, so that a prompt of megabytes would stop every stream of the process for seconds;
        # batches are encoded without it (tokenizers 0.23)
        [found] = self._backend.encode_batch_fast([text], add_special_tokens=adds_special_tokens)
        return list(found.ids)

    def _refuse_beyond_context(self, text: str) -> None:
        """Looks at the beginning of ``text``: tokens of megabytes of text take minutes and gigabytes.

        Twice the context, because the tokens at a cut may differ from those of the whole text.
        """
        context = self._read_context()
        looked_at = max(_CHARACTERS_PER_TOKEN * context, 1)
        while context and looked_at < len(text):
            [found] = self._backend.encode_batch_fast([text[:looked_at]], add_special_tokens=False)
            if len(found) > 2 * context:
                raise Unrenderable(
                    f"the prompt has more than {2 * context} tokens and the context holds {context} together with the "
                    f"output; send at most {context - 1}"
                )
            looked_at *= 2

    def rendered(self, request: Mapping[str, Any]) -> str:
        """The prompt of an OpenAI chat request as text. Raises Unrenderable."""
        if not self.has_template:
            raise Unrenderable(
                "the model has no chat template, so it takes no messages; send the text as prompt to /v1/completions"
            )
        if _tools_of(request) and not self._shows_tools:
            raise Unrenderable(NO_TOOLS)
        messages = [_with_objects(message) for message in request["messages"]]
        chosen = self._forms.choose(
            messages, lambda tried: self._tried(tried, request), has_values=bool(_template_values(request))
        )
        return self._rendered(chosen, request)

    def _tried(self, messages: list[dict[str, Any]], request: Mapping[str, Any]) -> str | None:
        try:
            return self._rendered(messages, request)
        except Unrenderable:
            return None

    def _rendered(self, messages: list[dict[str, Any]], request: Mapping[str, Any]) -> str:
        values = _template_values(request)
        ends_open = bool(values.pop("continue_final_message", False))
        tools = _tools_of(request)
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                documents=values.pop("documents", None),
                add_generation_prompt=bool(values.pop("add_generation_prompt", not ends_open)),
                continue_final_message=ends_open,
                tokenize=False,
                **values,
            )
        except Exception as error:  # a template may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise Unrenderable(
                f"the model's chat template can't render these messages: {reason[:300]}; change the messages or tools"
            ) from error
        return str(text)


def _tools_of(request: Mapping[str, Any]) -> Any:
    """The tools that the model may call, or None."""
    return None if request.get("tool_choice") == "none" else request.get("tools")


def _shows_tools(templates: Any) -> bool:
    """Whether any template of the tokenizer reads the tools; of several, transformers takes one that does."""
    found = templates.values() if isinstance(templates, Mapping) else [templates]
    return any(reads_tools(one) for one in found if isinstance(one, str))


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    """``message`` with its media parts and tool call arguments in the form that transformers' templates expect."""
    found = dict(message)
    if isinstance(parts := message.get("content"), list):
        found["content"] = [_plain_part(part) for part in parts]
    if isinstance(calls := message.get("tool_calls"), list):
        found["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return found


def _template_values(request: Mapping[str, Any]) -> dict[str, Any]:
    """The template's variables, from the same fields of the request that Dynamo passes to its templates."""
    values: dict[str, Any] = {}
    thinking = request.get("thinking")
    if isinstance(thinking, Mapping) and thinking.get("type") in ("enabled", "disabled"):
        values["thinking"] = values["enable_thinking"] = thinking["type"] == "enabled"
    if request.get("reasoning_effort") is not None:
        values["reasoning_effort"] = request["reasoning_effort"]
    for name in _OWN:
        if request.get(name) is not None:
            values[name] = request[name]
    for field in ("chat_template_args", "chat_template_kwargs"):
        if isinstance(given := request.get(field), Mapping):
            values |= given
    if taken := sorted(_RESERVED & values.keys()):
        raise Unrenderable(
            f"chat_template_kwargs contains {', '.join(taken)}, which can't be a template variable; remove it"
        )
    return values


def _plain_part(part: Any) -> Any:
    """``part`` with a media type as transformers' templates name it."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return {"type": _MEDIA[kind]} if kind in _MEDIA else part


def _with_parsed_arguments(call: Any) -> Any:
    """``call`` with its arguments parsed: OpenAI's API sends JSON text, and transformers' templates expect an object.

    vLLM and Dynamo do the same.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments := function.get("arguments"), str):
        return call
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": parsed}} if isinstance(parsed, dict) else call
