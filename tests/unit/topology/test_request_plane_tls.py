"""The phrase for the protection of requests and answers follows the variables that Dynamo reads."""

from __future__ import annotations

import pytest

from trtx.topology import request_protection

SERVER = {"CERT_PATH": "s.pem", "KEY_PATH": "s.key"}
MUTUAL = {**SERVER, "CA_CERT_PATH": "ca.pem", "CLIENT_CA_CERT_PATH": "ca.pem"}
CLIENT = {"CLIENT_CERT_PATH": "c.pem", "CLIENT_KEY_PATH": "c.key"}


@pytest.mark.parametrize(
    ("variables", "phrase"),
    [
        ({}, "clear, no authentication"),
        ({"HANDSHAKE_TIMEOUT_SECS": "3", "CERT_PATH": ""}, "clear, no authentication"),
        ({**SERVER, "CA_CERT_PATH": "ca.pem"}, "TLS, no authentication of clients"),
        ({**MUTUAL, **CLIENT}, "TLS, clients need a certificate"),
        (
            {**SERVER, "INSECURE": "1"},
            "TLS, but clients accept every certificate (DYN_TCP_TLS_INSECURE), no authentication of clients",
        ),
    ],
)
def test_complete_variables(variables: dict[str, str], phrase: str) -> None:
    assert request_protection({f"DYN_TCP_TLS_{name}": value for name, value in variables.items()}) == phrase


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({"CERT_PATH": "s.pem"}, "DYN_TCP_TLS_KEY_PATH and DYN_TCP_TLS_CA_CERT_PATH"),
        (SERVER, "DYN_TCP_TLS_CA_CERT_PATH"),
        ({"CA_CERT_PATH": "ca.pem"}, "DYN_TCP_TLS_CERT_PATH and DYN_TCP_TLS_KEY_PATH"),
        (MUTUAL, "DYN_TCP_TLS_CLIENT_CERT_PATH and DYN_TCP_TLS_CLIENT_KEY_PATH"),
    ],
)
def test_incomplete_variables_protect_nothing_and_the_missing_ones_are_named(
    variables: dict[str, str], missing: str
) -> None:
    phrase = request_protection({f"DYN_TCP_TLS_{name}": value for name, value in variables.items()})
    assert phrase.startswith("not protected") and phrase.endswith(f"set {missing} too")
