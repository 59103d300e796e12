"""Fields of a request body that trtx sets itself, so that neither extra inputs nor dataset records may set them."""

from __future__ import annotations

from collections.abc import Mapping

# Field -> the load's key that sets it, or None. A value set by hand would override the one that aiperf and the report
# assume. For example, answers without streaming would have no TTFT.
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
