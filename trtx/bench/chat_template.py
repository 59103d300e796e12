"""The fewest tokens that a chat request can have, by the template and the tokenizer of its model.

aiperf 0.13.0 takes the template's tokens off the length that is asked for, and sends one token of text at least: below
that every prompt is longer than it was asked to be. Neither torch nor transformers is imported, which take seconds.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from trtx.errors import UsageError
from trtx.text import load_decoder

_TEXT = "a"  # as short as text gets


def fewest_tokens(tokenizer: Path, enough: int) -> int | None:
    """Of a request of one message, with the beginning of its answer. ``tokenizer``: its directory.

    None where that can't be told here, and where ``enough`` tokens are more than it can have: no token is less than a
    byte, so nothing has to be counted then.
    """
    text = _rendered(tokenizer)
    if text is None or len(text.encode()) <= enough:
        return None
    try:
        # The template writes special tokens itself.
        return len(load_decoder(tokenizer).encode(text, add_special_tokens=False).ids)
    except UsageError:
        return None


def _rendered(tokenizer: Path) -> str | None:
    """As transformers renders it; None of a model without a template, or of one that takes more than text and time."""
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
    except Exception:  # of the template's own code, or a file that is not what it should be
        return None


def _template(tokenizer: Path, config: dict[str, Any]) -> str | None:
    """The file before the tokenizer's own."""
    if (path := tokenizer / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {one["name"]: one["template"] for one in found}.get("default")
    return found if isinstance(found, str) else None


def _content(token: Any) -> Any:
    """Of a token that is kept with how it is matched."""
    return token.get("content") if isinstance(token, dict) else token
