"""Which variables of an environment hold secrets, by their names: what serves clients inherits none of them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SECRET = re.compile(r"(^|_)(API_?KEY|TOKEN|PASSWORD|PASSWD|SECRET|SECRET_KEY|ACCESS_KEY|CREDENTIALS?)$", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """``OPENAI_API_KEY``, ``HF_TOKEN``, ``NATS_AUTH_PASSWORD``; not ``TOKENIZERS_PARALLELISM``."""
    return _SECRET.search(name) is not None


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """For a process that needs none of them: what a client sends may take it over."""
    return {name: value for name, value in environment.items() if not is_secret(name)}
