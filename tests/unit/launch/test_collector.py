"""A collector that does not answer is said once, before anything starts; an address that can't be one is refused."""

from __future__ import annotations

import socket

import pytest

from trtx.config import TopologySpec
from trtx.config.otlp import signal_url
from trtx.launch.collector import collector_warnings
from trtx.topology.commands import tracing_environment


def test_one_warning_names_the_endpoint_and_why() -> None:
    (warning,) = collector_warnings("http://127.0.0.1:1")

    assert (
        warning
        == "--otlp-endpoint http://127.0.0.1:1 does not answer (Connection refused); traces are lost until it does"
    )


def test_a_collector_that_answers_is_not_mentioned() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert collector_warnings(f"http://127.0.0.1:{server.getsockname()[1]}") == ()
    assert collector_warnings(None) == ()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("127.0.0.1:4318", "is not an address over HTTP"),
        ("grpc://127.0.0.1:4317", "is not an address over HTTP"),
        ("http://", "is not an address over HTTP"),
        ("http://[::1", "is no URL"),
        ("http://host:99999", "is no URL"),
        ("http://user:secret@host", "has a user or a password"),
        ("http://host?x=1", "has a query"),
        ("http://ho st", "has characters"),
    ],
)
def test_an_address_that_no_collector_has_is_refused(value: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        TopologySpec(otlp_endpoint=value)
    assert "secret@" not in str(refused.value).partition("[type=")[0]


@pytest.mark.parametrize("base", ["http://h:4318", "http://h:4318/", "http://h:4318/v1/traces"])
def test_each_signal_has_its_address(base: str) -> None:
    assert signal_url(base, "traces") == "http://h:4318/v1/traces"
    assert signal_url(base, "logs") == "http://h:4318/v1/logs"


def test_off_sets_nothing() -> None:
    assert tracing_environment(None, "agg-0", "warn") == {}
