"""The minimum number of tokens of a chat request, from the model's chat template and tokenizer.

aiperf 0.13.0 subtracts the template's tokens from the requested length and sends at least one token of text. If the
requested length is smaller than this minimum, every prompt is longer than requested. This module imports neither torch
nor transformers, each of which takes seconds.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from trtx.errors import UsageError
from trtx.text import load_decoder

_TEXT = "a"  # the shortest text


def fewest_tokens(tokenizer: Path, enough: int) -> int | None:
    """The token count of a request with one message and the generation prompt. ``tokenizer`` is its directory.

    Returns None if the count can't be determined, or if it can't exceed ``enough``: a token has at least one byte, so a
    rendered text of up to ``enough`` bytes is not tokenized.
    """
    text = _rendered(tokenizer)
    if text is None or len(text.encode()) <= enough:
        return None
    try:
        # The template itself writes the special tokens.
        return len(load_decoder(tokenizer).encode(text, add_special_tokens=False).ids)
    except UsageError:
        return None


def _rendered(tokenizer: Path) -> str | None:
    """The prompt as transformers renders it; None if the model has no template or the template needs other inputs."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise ValueError(message)

    try:
        config = json.loads((tokenizer / "tokenizer_config.json").read_bytes())
        template = _template(tokenizer, config)
        if template is None:
            return None
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = json.dumps
        environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        special = {name: _content(value) for name, value in config.items() if name.endswith("_token")}
        message = {"role": "user", "content": _TEXT}
        return environment.from_string(template).render(messages=[message], add_generation_prompt=True, **special)
    except Exception:  # raised by the template's code, or by a malformed file
        return None


def _template(tokenizer: Path, config: dict[str, Any]) -> str | None:
    """The chat template. ``chat_template.jinja`` takes precedence over the tokenizer's configuration."""
    if (path := tokenizer / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # several templates, by name
        found = {one["name"]: one["template"] for one in found}.get("default")
    return found if isinstance(found, str) else None


def _content(token: Any) -> Any:
    """The text of a special token, which a configuration stores as a string or as a mapping with matching options."""
    return token.get("content") if isinstance(token, dict) else token
