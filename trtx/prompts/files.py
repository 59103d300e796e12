"""Reads the files of a checkpoint that define its prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PROMPT_END = "trtx_prompt_end"
"""The template variable with which the frontend's HTTP proxy passes the end of a prompt to Dynamo."""


def tokenizer_config(model: Path) -> dict[str, Any]:
    """``tokenizer_config.json`` as a dict; empty if it is absent or unreadable."""
    try:
        found = json.loads((model / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def chat_template(model: Path) -> str | None:
    """The checkpoint's default chat template, found as transformers does: ``chat_template.jinja`` comes first.

    None if there is none. Raises OSError or ValueError if a file can't be read.
    """
    if (path := model / "chat_template.jinja").is_file():
        return path.read_bytes().decode()
    if (path := model / "chat_template.json").is_file():
        found = json.loads(path.read_bytes()).get("chat_template")
    else:
        found = tokenizer_config(model).get("chat_template")
    if isinstance(found, list):  # several named templates
        found = {one["name"]: one["template"] for one in found}.get("default")
    return found if isinstance(found, str) else None


def has_several_templates(model: Path) -> bool:
    """Whether the checkpoint has named templates, such as one for requests with tools, in addition to the default."""
    return (
        isinstance(tokenizer_config(model).get("chat_template"), list) or (model / "additional_chat_templates").is_dir()
    )
