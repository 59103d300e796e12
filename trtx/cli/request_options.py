"""The options of ``trtx bench`` for request fields whose syntax differs from that of a sweep file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from trtx.cli.command import optional
from trtx.cli.topology_options import split_words
from trtx.config.strict_yaml import parse_yaml
from trtx.config.wording import quoted
from trtx.errors import UsageError

_option = partial(optional, "Requests")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Additional fields of every request body, and additional arguments of aiperf."""

    temperature: Annotated[
        float | None, _option("--temperature", "Sampling temperature of every request. Default: the server's.")
    ] = None
    top_p: Annotated[float | None, _option("--top-p", "top_p of every request. Default: the server's.")] = None
    top_k: Annotated[int | None, _option("--top-k", "top_k of every request. Default: the server's.")] = None
    extra_inputs: Annotated[
        list[str] | None,
        _option(
            "--extra-inputs",
            "Additional field of every request's body, or several as a JSON object. Repeatable.",
            metavar="KEY:VALUE",
        ),
    ] = None
    aiperf_args: Annotated[
        str | None,
        _option(
            "--aiperf-args",
            "Additional flags of aiperf, in quotes. Flags that trtx sets itself are refused.",
            metavar='"FLAGS"',
        ),
    ] = None


_SAMPLING = ("temperature", "top_p", "top_k")


def request_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the request options to fields of ``load`` in a sweep file. Raises UsageError, which names the option."""
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
    """Parses ``temperature:0.5`` or ``a:1,b:x`` with YAML values, or a JSON object; aiperf accepts both forms."""
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
                f"--extra-inputs {quoted(text)} is not KEY:VALUE with each key once; expected temperature:0.5 or the "
                "like. Write JSON if a value has a comma"
            )
        fields[name] = parse_yaml(value, f"--extra-inputs {name}", is_file=False)
    return fields
