"""Fields of a request body that say what is measured: neither a load's extra inputs nor a record may hold them."""

from __future__ import annotations

from collections.abc import Mapping

# Each with the key of a load that it belongs to. Given by hand they would win over what aiperf and the report take for
# asked: no TTFT is one of a body that did not stream.
OWNED_FIELDS: Mapping[str, str | None] = {
    "stream": "streaming",
    "max_tokens": "osl",
    "max_completion_tokens": "osl",
    "min_tokens": "ignore_eos",
    "ignore_eos": "ignore_eos",
    "messages": "isl",
    "prompt": "isl",
    "model": None,
    "n": None,
    "best_of": None,
    "stream_options": None,
}
