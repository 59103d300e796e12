"""Which of Dynamo's parsers read a model's tool calls and its reasoning, decided from its chat template.

A template writes the calls and the reasoning of earlier turns in the form in which the model writes its own, so the
template's text shows the format. The architecture decides only where two families write the same text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from jinja2 import Environment, TemplateSyntaxError

NO_TOOLS = (
    "the request has tools, and the chat template of this model shows it none; leave tools out, or serve the model "
    "with a template that shows them (trtx serve --chat-template FILE)"
)
"""The refusal of tools that the model would not see."""


@dataclass(frozen=True, slots=True)
class ParserChoice:
    """The name of a parser of Dynamo, or None, and the reason as a clause that follows "because"."""

    parser: str | None
    because: str


@dataclass(frozen=True, slots=True)
class _Format:
    """A format: ``text`` is in every template that writes it, and ``without`` in none of them."""

    text: str
    parser: str | None
    without: str = ""
    architectures: tuple[str, ...] = ()  # empty: any
    reason: str = ""  # empty if the text is the reason


# The first format whose text is in the template. The names are those of Dynamo 1.6.1.
_TOOLS = (
    _Format("<|channel|>", "harmony"),
    _Format("<function=", "qwen3_coder"),
    _Format("<arg_key>", "glm47"),
    _Format("<TOOLCALL>", "nemotron_deci"),
    _Format("<tool_call>", "hermes"),
    _Format("[ARGS]", None, reason="its calls have the form [TOOL_CALLS]name[ARGS], which no parser of Dynamo reads"),
    _Format("[TOOL_CALLS]", "mistral"),
    _Format("<｜tool▁calls▁begin｜>", "deepseek_v3_1", without="```json"),
    _Format("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    _Format("", "pythonic", architectures=("Llama4ForConditionalGeneration", "Llama4ForCausalLM")),
    _Format("<|start_header_id|>", "llama3_json", architectures=("LlamaForCausalLM", "MllamaForConditionalGeneration")),
)
_REASONING = (
    _Format("<|channel|>analysis", "gpt_oss"),
    _Format("[THINK]", "mistral"),
    _Format("<TOOLCALL>", "nemotron_deci"),
    # DeepSeek V3.1 thinks only on request, R1 always, and its distilled models have its template.
    _Format("<｜Assistant｜>", "deepseek_r1", without="thinking"),
    _Format("<｜Assistant｜>", "deepseek_v3_1"),
    _Format("<think>", "qwen3"),
)
_ENDS_THINKING = ("</think>", "[/THINK]", "<|channel|>analysis")


def tool_parser_of(architecture: str, template: str | None) -> ParserChoice:
    """The parser of the tool calls of a model with this chat template."""
    if template is None:
        return ParserChoice(None, "the model has no chat template")
    if not reads_tools(template):
        return ParserChoice(None, "the chat template shows the model no tools")
    return _first(_TOOLS, architecture, template) or ParserChoice(
        None, "the form of the calls in the chat template is none that trtx knows"
    )


def reasoning_parser_of(architecture: str, template: str | None) -> ParserChoice:
    """The parser of the reasoning of a model with this chat template."""
    if template is None:
        return ParserChoice(None, "the model has no chat template")
    found = None
    if any(text in template for text in _ENDS_THINKING):
        found = _first(_REASONING, architecture, template)
    return found or ParserChoice(None, "the chat template has no marks of reasoning that trtx knows")


def _first(formats: tuple[_Format, ...], architecture: str, template: str) -> ParserChoice | None:
    for one in formats:
        if one.text not in template or (one.without and one.without in template):
            continue
        if one.architectures and architecture not in one.architectures:
            continue
        family = f"the model is {architecture}" if one.architectures else ""
        text = f"the chat template contains {one.text}" if one.text else ""
        return ParserChoice(one.parser, one.reason or " and ".join(filter(None, (family, text))))
    return None


def reads_tools(template: str) -> bool:
    """Whether the chat template reads the variable ``tools``; a text or a comment about tools does not count."""
    try:
        tokens = list(Environment().lex(template))
    except TemplateSyntaxError:  # for example, a tag that only transformers defines
        return re.search(r"\btools\b", template) is not None
    return any(kind == "name" and text == "tools" for _, kind, text in tokens)
