"""Finds environment variables that hold secrets, by name. Processes that serve clients inherit none of them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SECRET = re.compile(r"(^|_)(API_?KEY|TOKEN|PASSWORD|PASSWD|SECRET|SECRET_KEY|ACCESS_KEY|CREDENTIALS?)$", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Returns True for ``OPENAI_API_KEY``, ``HF_TOKEN``, ``NATS_AUTH_PASSWORD``; not for ``TOKENIZERS_PARALLELISM``."""
    return _SECRET.search(name) is not None


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without secrets, for a process that a malicious client request might compromise."""
    return {name: value for name, value in environment.items() if not is_secret(name)}
