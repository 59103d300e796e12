"""``trtx serve``, ``bench`` and ``eval`` over TLS: real frontends, workers, aiperf and lm-eval on loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
from pathlib import Path

import pytest
from called import call
from certificates import Pair, make
from topology_clients import PACED, trtx_serve, wait_until

from trtx.experiment import Attach
from trtx.experiment.deployment import ask_deployment
from trtx.tls import default_trust
from trtx.topology import Plan

LOAD = ("--concurrency", "2", "--isl", "32", "--osl", "8", "--request-count", "6", "--warmup-request-count", "2")


def words(pair: Pair) -> tuple[str, ...]:
    return ("--tls-cert", str(pair.certificate), "--tls-key", str(pair.key))


def shown(plan: Plan) -> str:
    """The certificate that the HTTP port shows, in PEM."""
    return ssl.get_server_certificate(("127.0.0.1", plan.port), timeout=10)


def says_in_the_clear(plan: Plan) -> bytes:
    """What the HTTP port answers to a request that is not encrypted."""
    with socket.create_connection(("127.0.0.1", plan.port), timeout=10) as plain:
        plain.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        try:
            return plain.recv(1000)
        except ConnectionResetError:
            return b""


def test_a_server_is_asked_by_its_certificate_whatever_its_name_and_through_a_frontends_death(tmp_path: Path) -> None:
    """Its certificate is another one by then, as an operator's renewal leaves it: a frontend reads it as it starts."""
    pair = make(tmp_path, "own", ["llm.example.com"], signer=make(tmp_path, "authority"))
    with trtx_serve(*PACED, "--host", "0.0.0.0", *words(pair)) as serve:
        plan = serve.wait_ready()
        assert plan.url == f"https://127.0.0.1:{plan.port}"
        curl = re.search(r"^curl .*?'$\n\n", serve.text(), re.DOTALL | re.MULTILINE)
        assert curl is not None and "https://llm.example.com:" in curl.group(), serve.text()

        def ask() -> int:
            answer = subprocess.run(curl.group(), shell=True, capture_output=True, text=True, timeout=30, check=False)
            return int(json.loads(answer.stdout)["usage"]["completion_tokens"]) if answer.returncode == 0 else 0

        assert ask() > 0
        assert b"HTTP/1.1 200" not in says_in_the_clear(plan)
        assert "without authentication" in serve.text() and "clear text" not in serve.text()
        key = pair.key.read_bytes()
        assert not [path for path in plan.run_dir.rglob("*") if path.is_file() and key in path.read_bytes()]

        before = shown(plan)
        after = make(tmp_path, "own", ["llm.example.com"]).certificate.read_text()
        assert shown(plan) == before != after and ask() == 0, "curl alone goes by the file that is there now"
        os.kill(serve.pid_of("frontend"), signal.SIGKILL)
        wait_until(lambda: "the topology is whole again: a request went through" in serve.text(), 60, "whole again")
        assert shown(plan) == after and ask() > 0


@pytest.mark.proof  # measured and scored
def test_a_run_measures_and_scores_its_own_topology_over_tls(tmp_path: Path) -> None:
    pair = make(tmp_path, "own", ["localhost"])
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(
        json.dumps(
            {
                "topology": {"model": "synthetic:tiny-trained", "host": "localhost"},
                "eval": {"tasks": "trtx_copying", "limit": 2, "min_score": ["trtx_copying:exact_match:0"]},
            }
        )
    )
    done = call("bench", str(sweep), *LOAD, "--prompt-corpus", "random", *words(pair), "-o", str(tmp_path / "runs"))
    assert done.code == 0, done.out + done.err
    (run_dir,) = (tmp_path / "runs").iterdir()
    (row,) = json.loads((run_dir / "summary.json").read_text())["rows"]
    assert (row["request_count"], row["error_request_count"]) == (6, 0)
    (scores,) = run_dir.glob("eval/*/eval.json")
    (task,) = json.loads(scores.read_text())["tasks"]
    assert (task["samples"], task["answered"]) == (2, 2)


@pytest.mark.proof
def test_what_somebody_else_serves_is_trusted_by_name_and_authority_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = make(tmp_path, "authority")
    pair = make(tmp_path, "own", ["localhost"], signer=authority)
    with trtx_serve(*PACED, *words(pair)) as serve:
        plan = serve.wait_ready()
        url, runs = f"https://localhost:{plan.port}", str(tmp_path / "runs")
        for address, trusted, because in (
            (url, None, "is not trusted here .*local issuer"),
            (f"https://127.0.0.1:{plan.port}", authority.certificate, "is not trusted here .*IP address mismatch"),
            (f"http://localhost:{plan.port}", authority.certificate, "did not answer as OpenAI's API does"),
        ):
            default_trust.cache_clear()  # of a process that asks once
            variables = {"SSL_CERT_FILE": None if trusted is None else str(trusted)}
            refused = call("bench", *LOAD, "--url", address, "-o", runs, variables=variables)
            assert refused.code == 2 and re.search(because, refused.err), refused.err
            assert not (tmp_path / "runs").exists()
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
        default_trust.cache_clear()
        assert ask_deployment(Attach(url=url)).workers == {"agg": 1}, "the routes beside OpenAI's are read too"
    default_trust.cache_clear()
