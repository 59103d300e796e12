"""How the connections of Dynamo's TCP request plane are protected, from the variables of its processes."""

from __future__ import annotations

from collections.abc import Mapping

_SERVER = ("DYN_TCP_TLS_CERT_PATH", "DYN_TCP_TLS_KEY_PATH")
_CLIENT = ("DYN_TCP_TLS_CLIENT_CERT_PATH", "DYN_TCP_TLS_CLIENT_KEY_PATH")
_AUTHORITY, _CLIENT_AUTHORITY = "DYN_TCP_TLS_CA_CERT_PATH", "DYN_TCP_TLS_CLIENT_CA_CERT_PATH"
_INSECURE = "DYN_TCP_TLS_INSECURE"


def request_protection(env: Mapping[str, str]) -> str:
    """Returns a phrase for the protection of requests and answers. The files of the variables are not read.

    Dynamo 1.6.1 serves TLS if certificate and key are set, and demands certificates of clients if their authority is
    set. Every process serves and dials, so all variables of one side are useless without those of the other side.
    """
    verified = bool(env.get(_AUTHORITY))
    insecure = env.get(_INSECURE, "").lower() in ("1", "true", "yes", "on")
    wanted = [*_SERVER] if verified or insecure else [*_SERVER, _AUTHORITY]
    if env.get(_CLIENT_AUTHORITY):
        wanted += _CLIENT
    named = (*_SERVER, *_CLIENT, _AUTHORITY, _CLIENT_AUTHORITY)
    if not any(env.get(name) for name in named) and not insecure:
        return "clear, no authentication"
    if missing := [name for name in wanted if not env.get(name)]:
        return f"not protected by the DYN_TCP_TLS variables that are set: set {' and '.join(missing)} too"
    certificates = "TLS" if verified else "TLS, but clients accept every certificate (DYN_TCP_TLS_INSECURE)"
    clients = "clients need a certificate" if env.get(_CLIENT_AUTHORITY) else "no authentication of clients"
    return f"{certificates}, {clients}"
