"""The metric families of Dynamo 1.6.1 that trtx's dashboards and rules rely on."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from trtx.engine.served_family import Kind, ServedFamily, Server, Unit

_FRONTEND: tuple[Server, ...] = ("frontend",)


def _all(*records: tuple[Kind, str, Unit, str, tuple[str, ...], tuple[Server, ...], str]) -> Mapping[str, ServedFamily]:
    made = (
        ServedFamily(name, kind, unit, meaning, labels, by, when)
        for kind, name, unit, meaning, labels, by, when in records
    )
    return MappingProxyType({family.name: family for family in made})


_REQUEST = "after the first request"
_MODEL = ("model",)

UPSTREAM: Mapping[str, ServedFamily] = _all(
    (
        "counter",
        "dynamo_frontend_requests_total",
        "requests",
        "Requests that ended, by status and by type of error.",
        ("model", "endpoint", "request_type", "status", "error_type"),
        _FRONTEND,
        _REQUEST,
    ),
    (
        "gauge",
        "dynamo_frontend_inflight_requests",
        "requests",
        "Requests between arrival and their end.",
        _MODEL,
        _FRONTEND,
        _REQUEST,
    ),
    (
        "gauge",
        "dynamo_frontend_queued_requests",
        "requests",
        "Requests before their first token.",
        _MODEL,
        _FRONTEND,
        _REQUEST,
    ),
    (
        "histogram",
        "dynamo_frontend_time_to_first_token_seconds",
        "seconds",
        "From the request's arrival in the frontend to its first token.",
        _MODEL,
        _FRONTEND,
        _REQUEST,
    ),
    (
        "histogram",
        "dynamo_frontend_inter_token_latency_seconds",
        "seconds",
        "Between two tokens of one request.",
        _MODEL,
        _FRONTEND,
        _REQUEST,
    ),
    (
        "histogram",
        "dynamo_frontend_request_duration_seconds",
        "seconds",
        "From the request's arrival to its end.",
        _MODEL,
        _FRONTEND,
        _REQUEST,
    ),
    (
        "counter",
        "dynamo_frontend_output_tokens_total",
        "tokens",
        "Output tokens, counted as they are sent.",
        _MODEL,
        _FRONTEND,
        _REQUEST,
    ),
    (
        "histogram",
        "dynamo_frontend_input_sequence_tokens",
        "tokens",
        "Length of the prompts.",
        _MODEL,
        _FRONTEND,
        _REQUEST,
    ),
    (
        "histogram",
        "dynamo_frontend_stage_duration_seconds",
        "seconds",
        "Time of a request in a stage of the frontend: preprocess, route, transport_roundtrip.",
        ("stage",),
        _FRONTEND,
        _REQUEST,
    ),
    (
        "gauge",
        "dynamo_frontend_model_ready",
        "boolean",
        "1 if the frontend can route a request for the model.",
        _MODEL,
        _FRONTEND,
        "",
    ),
)
"""By name."""
