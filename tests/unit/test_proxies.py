"""No request of trtx takes a proxy that the environment names, as aiperf's load takes none: one route for both."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import trtx

_MAKERS = {"Client", "AsyncClient", "get", "post", "put", "delete", "head", "patch", "request", "stream"}


@pytest.mark.slow
def test_every_client_of_httpx_is_told_to_leave_the_environment_alone() -> None:
    seen = 0
    for path in Path(trtx.__file__).parent.rglob("*.py"):
        if "httpx" not in (source := path.read_text(encoding="utf-8")):
            continue
        for call in ast.walk(ast.parse(source)):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            if call.func.attr not in _MAKERS or ast.unparse(call.func.value) != "httpx":
                continue
            seen += 1
            told = {word.arg: ast.unparse(word.value) for word in call.keywords}
            assert told.get("trust_env") == "False", f"{path.name}:{call.lineno} would take a proxy; trust_env=False"
    assert seen > 5


@pytest.mark.slow
def test_aiperfs_own_clients_take_none() -> None:
    from aiperf.transports.http_defaults import AioHttpDefaults

    assert AioHttpDefaults.TRUST_ENV is False
