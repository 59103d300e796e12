"""The options of ``trtx bench`` that say what its requests hold: where prompts come from, what each body carries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from trtx.cli.topology_options import split_words
from trtx.config.strict_yaml import parse_yaml
from trtx.config.wording import quoted
from trtx.errors import UsageError

_PROMPTS, _REQUESTS = "Prompts", "Requests"


def _option(panel: str, name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel=panel, show_default=False, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """As it is typed; help shows the options in this order. Each has its field's name in ``LoadSpec``, and aiperf's."""

    prompt_corpus: Annotated[
        str | None,
        _option(
            _PROMPTS,
            "--prompt-corpus",
            "Text that prompts are cut from: sonnet, coding or random. Default: sonnet.",
            metavar="NAME",
        ),
    ] = None
    input_file: Annotated[
        Path | None,
        _option(
            _PROMPTS,
            "--input-file",
            "Records or a trace in place of such text, with lengths of their own.",
            metavar="FILE",
        ),
    ] = None
    custom_dataset_type: Annotated[
        str | None,
        _option(
            _PROMPTS,
            "--custom-dataset-type",
            "What it holds, such as single_turn, multi_turn or mooncake_trace. Default: aiperf looks.",
            metavar="TYPE",
        ),
    ] = None
    fixed_schedule: Annotated[
        bool,
        _option(
            _PROMPTS,
            "--fixed-schedule",
            "Send each request of a mooncake_trace at its own time, in place of a concurrency or a rate.",
        ),
    ] = False
    public_dataset: Annotated[
        str | None,
        _option(
            _PROMPTS, "--public-dataset", "One that aiperf downloads, such as sharegpt or spec_bench.", metavar="NAME"
        ),
    ] = None
    session_turns_mean: Annotated[
        int | None,
        _option(_PROMPTS, "--session-turns-mean", "Requests of a conversation, each with all before it. Default: 1."),
    ] = None
    session_turns_stddev: Annotated[
        int | None,
        _option(_PROMPTS, "--session-turns-stddev", "Draw their number with this standard deviation. Default: 0."),
    ] = None
    session_turn_delay_mean: Annotated[
        float | None, _option(_PROMPTS, "--session-turn-delay-mean", "ms from an answer to the next turn. Default: 0.")
    ] = None
    session_turn_delay_stddev: Annotated[
        float | None,
        _option(_PROMPTS, "--session-turn-delay-stddev", "Draw it with this standard deviation. Default: 0."),
    ] = None
    num_prefix_prompts: Annotated[
        int | None,
        _option(
            _PROMPTS, "--num-prefix-prompts", "Beginnings that prompts share, each prompt one of them. Default: 1."
        ),
    ] = None
    prefix_prompt_length: Annotated[
        int | None, _option(_PROMPTS, "--prefix-prompt-length", "Tokens of each, a part of --isl.")
    ] = None
    shared_system_prompt_length: Annotated[
        int | None,
        _option(
            _PROMPTS,
            "--shared-system-prompt-length",
            "Tokens of a system message before every prompt, a part of --isl. Default: 0.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Further fields of every request's body, and further words of aiperf's command line."""

    temperature: Annotated[
        float | None, _option(_REQUESTS, "--temperature", "Of every request. Default: the server's.")
    ] = None
    top_p: Annotated[float | None, _option(_REQUESTS, "--top-p", "The same.")] = None
    top_k: Annotated[int | None, _option(_REQUESTS, "--top-k", "The same.")] = None
    extra_inputs: Annotated[
        list[str] | None,
        _option(
            _REQUESTS,
            "--extra-inputs",
            "A further field of every request's body, or several as JSON. Repeatable.",
            metavar="KEY:VALUE",
        ),
    ] = None
    aiperf_args: Annotated[
        str | None,
        _option(
            _REQUESTS,
            "--aiperf-args",
            "Further flags of aiperf, for what has none here; refused where trtx sets them itself.",
            metavar='"FLAGS"',
        ),
    ] = None


_SAMPLING = ("temperature", "top_p", "top_k")


def request_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """What was typed of every request, as a sweep file would say it under ``load``. Or UsageError naming the option."""
    inputs: dict[str, Any] = {}
    for name in _SAMPLING:
        if name in given:
            inputs[name] = given[name]
    for text in given.get("extra_inputs") or ():
        for name, value in _extra_inputs(text).items():
            if name in inputs:
                raise UsageError(f"--extra-inputs {quoted(text)} gives {name} a second value; leave one of them out")
            inputs[name] = value
    fields: dict[str, Any] = {"extra_inputs": inputs} if inputs else {}
    if "aiperf_args" in given:
        fields["aiperf_args"] = split_words("--aiperf-args", given["aiperf_args"])
    return fields


def _extra_inputs(text: str) -> dict[str, Any]:
    """``temperature:0.5`` or ``a:1,b:x``, values as YAML reads them; or a JSON object. Both are aiperf's forms."""
    if text.lstrip().startswith("{"):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise UsageError(
                f"--extra-inputs {quoted(text)} is not JSON ({error}); expected an object of fields"
            ) from error
        return dict(found)
    fields: dict[str, Any] = {}
    for part in text.split(","):
        name, colon, value = (piece.strip() for piece in part.partition(":"))
        if not name or not colon or not value or name in fields:
            raise UsageError(
                f"--extra-inputs {quoted(text)} is not KEY:VALUE, each key once; expected such as temperature:0.5, or "
                "JSON where a value has a comma"
            )
        fields[name] = parse_yaml(value, f"--extra-inputs {name}", is_file=False)
    return fields
