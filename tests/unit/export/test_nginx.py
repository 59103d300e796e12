"""The gateway's configuration: the frontends that trtx serve plans, and what is refused rather than misread."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from called import call
from certificates import make

from trtx.config import TopologySpec
from trtx.config.hosts import read_hosts
from trtx.errors import UsageError
from trtx.export.nginx import frontends_of, parse_listen
from trtx.launch.host_preparation import prepare_hosts
from trtx.launch.preparation import HOLDER, prepare
from trtx.topology import Plan

HOSTS = """
etcd: [http://10.77.0.9:2379]
nats: nats://10.77.0.9:4222
hosts:
- {name: node1, address: 10.77.0.1, device: eth1, frontends: 2}
- {name: node2, address: 10.77.0.2, device: eth1, frontends: 1}
"""


def listening(plan: Plan) -> tuple[tuple[str, int], ...]:
    return tuple(plan.http_of(frontend) for frontend in plan.frontends)


def test_its_frontends_are_those_of_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "hosts.yaml"
    file.write_text(HOSTS)
    hosts = read_hosts(file)
    spec = TopologySpec(engine="paced", workers=2, host="127.0.0.2", port=9870)
    here = prepare(spec, run_dir=tmp_path / "run", frontends=3)
    HOLDER.release((*(port for _, port in listening(here)), *here.internal_ports))
    assert listening(here) == frontends_of(spec, 3, None)
    over_hosts, _ = prepare_hosts(spec, hosts, run_dir=tmp_path / "run")
    assert listening(over_hosts) == frontends_of(spec, 1, hosts)


@pytest.mark.parametrize(
    "text", ["8080", "localhost:8080", "0.0.0.0:0", "0.0.0.0:65536", "::1:8080", "[127.0.0.1]:80", "a;b:80"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--listen .* is not an address; expected"):
        parse_listen(text)


def test_addresses_of_both_families_are_taken() -> None:
    assert (parse_listen("0.0.0.0:8443"), parse_listen("[::]:80")) == (("0.0.0.0", 8443), ("::", 80))


REFUSED = {
    "a port drawn anew": (["--port", "0"], "--port 0 means any free port"),
    "frontends that are open": (["--host", "0.0.0.0"], "lets everybody go round nginx"),
    "no port left": (["--port", "65535", "--frontends", "2"], "leaves no ports"),
    "its own frontend": (["--listen", "127.0.0.1:8001", "--frontends", "2"], "is the address of a frontend"),
    "every address": (["--listen", "0.0.0.0:8000"], "is the address of a frontend"),
    "a variable": (["--api-keys", "$home/keys"], "has a character that nginx's configuration gives a meaning"),
    "a directory": (["--api-keys", "."], "is a directory; expected a file with a key in each line"),
    "a key alone": (["--listen-key", "own.key"], "--listen-key has no effect without --listen-cert"),
    "a certificate alone": (["--tls-cert", "own.pem"], "--tls-key is missing beside a certificate"),
    "an authority that is not there": (
        ["--tls-cert", "leaf.pem", "--tls-key", "leaf.key"],
        "nginx can't verify the frontends with this certificate .*issuer.*append the certificates of its issuers",
    ),
    "no rate": (["--rate-limit", "0"], "--rate-limit 0 is not a rate; expected requests per second"),
    "a rate of no key": (["--rate-limit-per-key", "2"], "--rate-limit-per-key has no effect without --api-keys"),
    "a burst of no rate": (["--rate-burst", "2"], "--rate-burst has no effect without --rate-limit"),
    "both": (["--hosts", "hosts.yaml", "--frontends", "2"], "--frontends has no effect with --hosts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_misread_or_would_not_work_is_refused(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, because = REFUSED[case]
    (tmp_path / "hosts.yaml").write_text(HOSTS)
    make(tmp_path, "own", ["localhost"])
    make(tmp_path, "leaf", ["localhost"], signer=make(tmp_path, "authority"))
    done = call("export", "nginx", *arguments, "-o", "gateway", directory=tmp_path)
    assert done.code == 2 and done.err.count("\n") == 1, done.err
    assert re.search(because, done.err), done.err
    assert not (tmp_path / "gateway").exists()


def test_whoever_opens_it_is_told_what_it_lacks(tmp_path: Path) -> None:
    make(tmp_path, "own", ["localhost"])
    tls = ["--listen-cert", "own.pem", "--listen-key", "own.key"]
    opened = ["export", "nginx", "--listen", "0.0.0.0:8443"]
    assert "in clear text (--listen-cert and --listen-key) and without authentication" in call(*opened).err
    assert "in clear text" not in call(*opened, *tls, directory=tmp_path).err
    assert call(*opened, *tls, "--api-keys", "keys.map", directory=tmp_path).err == ""
    assert call("export", "nginx").err == ""


def test_what_serve_takes_of_a_body_passes(tmp_path: Path) -> None:
    assert "client_max_body_size 45m;" in call("export", "nginx").out
    assert "client_max_body_size 130m;" in call("export", "nginx", "--max-media-bytes", "100000000").out
