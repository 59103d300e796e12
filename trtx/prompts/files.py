"""The files of a checkpoint that say how its prompts are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def tokenizer_config(model: Path) -> dict[str, Any]:
    """``tokenizer_config.json``; empty where the checkpoint has none that can be read."""
    try:
        found = json.loads((model / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def chat_template(model: Path) -> str | None:
    """The chat template that transformers uses by default: ``chat_template.jinja`` before the others; None where the
    checkpoint has none. Raises OSError or ValueError for a file that can't be read."""
    if (path := model / "chat_template.jinja").is_file():
        return path.read_bytes().decode()
    if (path := model / "chat_template.json").is_file():
        found = json.loads(path.read_bytes()).get("chat_template")
    else:
        found = tokenizer_config(model).get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {one["name"]: one["template"] for one in found}.get("default")
    return found if isinstance(found, str) else None


def has_several_templates(model: Path) -> bool:
    """Whether the chat template depends on what is asked, as one for tools beside the default does."""
    return (
        isinstance(tokenizer_config(model).get("chat_template"), list) or (model / "additional_chat_templates").is_dir()
    )
