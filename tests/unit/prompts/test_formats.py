"""Which parsers a chat template chooses. The templates below are cut to the texts by which families differ."""

from __future__ import annotations

import pytest

from trtx.prompts.formats import reads_tools, reasoning_parser_of, tool_parser_of

TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
QWEN, LLAMA = "Qwen3ForCausalLM", "LlamaForCausalLM"
FAMILIES = [
    # architecture, template, parser of tool calls, parser of reasoning
    ("Qwen2ForCausalLM", TOOLS + "<|im_start|><tool_call>", "hermes", None),
    (QWEN, TOOLS + "<tool_call>{% if enable_thinking %}<think>\n\n</think>{% endif %}", "hermes", "qwen3"),
    ("Qwen3MoeForCausalLM", TOOLS + "<tool_call>\n<function=name>\n<parameter=x>", "qwen3_coder", None),
    (LLAMA, TOOLS + "<|start_header_id|>Environment: ipython<|eot_id|>", "llama3_json", None),
    (LLAMA, TOOLS + "<|im_start|><tool_call>", "hermes", None),
    ("Llama4ForConditionalGeneration", TOOLS + "<|header_start|>", "pythonic", None),
    ("MistralForCausalLM", TOOLS + "[AVAILABLE_TOOLS][TOOL_CALLS] [", "mistral", None),
    ("MistralForCausalLM", TOOLS + "[TOOL_CALLS]{{ name }}[ARGS]", None, None),
    ("MistralForCausalLM", TOOLS + "[TOOL_CALLS] [[THINK]x[/THINK]", "mistral", "mistral"),
    ("DeepseekV3ForCausalLM", TOOLS + "<｜tool▁calls▁begin｜>```json<｜Assistant｜>", "deepseek_v3", None),
    (
        "DeepseekV3ForCausalLM",
        TOOLS + "<｜tool▁calls▁begin｜>\n```json<｜Assistant｜><think>\n{{ c.split('</think>') }}",
        "deepseek_v3",
        "deepseek_r1",
    ),
    (
        "DeepseekV3ForCausalLM",
        TOOLS + "<｜tool▁calls▁begin｜>{% if not thinking is defined %}<｜Assistant｜></think><think>",
        "deepseek_v3_1",
        "deepseek_v3_1",
    ),
    ("Qwen2ForCausalLM", "<｜Assistant｜>{{ c.split('</think>') }}", None, "deepseek_r1"),
    ("GptOssForCausalLM", TOOLS + "<|start|>assistant<|channel|>analysis<|message|>", "harmony", "gpt_oss"),
    ("DeciLMForCausalLM", TOOLS + "<TOOLCALL><think></think>", "nemotron_deci", "nemotron_deci"),
    ("Gemma3ForCausalLM", "<start_of_turn>model", None, None),
]


@pytest.mark.parametrize(("architecture", "template", "tools", "reasoning"), FAMILIES)
def test_the_template_of_a_family_chooses_its_parsers(
    architecture: str, template: str, tools: str | None, reasoning: str | None
) -> None:
    assert tool_parser_of(architecture, template).parser == tools
    assert reasoning_parser_of(architecture, template).parser == reasoning


def test_every_parser_that_a_template_can_choose_is_one_of_the_installed_dynamo() -> None:
    from dynamo._core import get_reasoning_parser_names, get_tool_parser_names

    assert {tools for *_, tools, _ in FAMILIES} - {None} <= set(get_tool_parser_names())
    assert {reasoning for *_, reasoning in FAMILIES} - {None} <= set(get_reasoning_parser_names())


@pytest.mark.parametrize(
    ("template", "because"),
    [
        (None, "the model has no chat template"),
        ("<tool_call>{{ messages }}", "the chat template shows the model no tools"),
        (TOOLS + "functools[", "the form of the calls in the chat template is none that trtx knows"),
        (TOOLS + "[TOOL_CALLS]a[ARGS]{}", "its calls have the form [TOOL_CALLS]name[ARGS], which no parser of Dynamo"),
    ],
)
def test_a_model_without_a_parser_gets_the_reason(template: str | None, because: str) -> None:
    found = tool_parser_of(QWEN, template)
    assert found.parser is None and found.because.startswith(because)


@pytest.mark.parametrize(
    ("template", "reads"),
    [
        (TOOLS, True),
        ("{% generation %}{% for t in tools %}{% endfor %}{% endgeneration %}", True),
        ("{{ message.tools }}", True),  # such a template may show them
        ("You have tools. {# tools #} {{ 'tools' }}", False),
    ],
)
def test_a_template_shows_tools_if_it_reads_them(template: str, reads: bool) -> None:
    assert reads_tools(template) is reads
