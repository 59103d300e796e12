"""``trtx doctor --hosts`` on two hosts at the same time, over their link, and with that link blocked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from host_shares import write_hosts
from host_topology import Servers
from namespaces import Host, Hosts


def start(host: Host, file: Path, *arguments: str) -> subprocess.Popen[str]:
    argv = [*host.through(), sys.executable, "-m", "trtx", "doctor", "--hosts", os.fspath(file), "--json", *arguments]
    with host.entered():
        return subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )


def rows(process: subprocess.Popen[str]) -> dict[str, dict[str, Any]]:
    said, problem = process.communicate(timeout=120)
    assert process.returncode in (0, 4), problem
    return {check["name"]: check for check in json.loads(said)["checks"]}


def test_two_doctors_see_each_other_etcd_and_nats(hosts: Hosts, servers: Servers, tmp_path: Path) -> None:
    file = write_hosts(hosts, tmp_path, node1={"roles": {"agg": 1}}, node2={"roles": {"agg": 1}})
    first = start(hosts.first, file, "--wait", "60")
    second = start(hosts.second, file, "--wait", "60")
    of_first, of_second = rows(first), rows(second)
    for found, other in ((of_first, "host 2"), (of_second, "host 1")):
        amiss = [check for name, check in found.items() if name.startswith("etcd")]  # a busy disk is another row
        assert {check["status"] for check in amiss} == {"warning"}
        assert any("requires no authentication" in check["seen"] for check in amiss)
        assert "etcd in clear" in found["planes"]["seen"]
        assert found[other]["status"] == "ok"
        for row in ("ports", "clock", "device", "versions"):
            assert found[f"{other} {row}"]["status"] == "ok", found[f"{other} {row}"]
    assert of_first["host 1"]["seen"].endswith("this machine")
    assert of_second["host 2 ports"]["seen"] == "6 planned ports are free"
    # HTTP, and where its frontend waits for requests of other frontends and for answers
    assert of_second["host 1 ports"]["seen"] == "9 planned ports reached"


@pytest.mark.proof
def test_a_port_that_is_blocked_on_the_way_is_named(hosts: Hosts, servers: Servers, tmp_path: Path) -> None:
    file = write_hosts(hosts, tmp_path, node1={"roles": {"agg": 1}}, node2={"roles": {"agg": 1}})
    blocked = ("ip", "-n", hosts.second.namespace, "rule")
    # What goes to port 17001 of the second host is answered by nobody: its answers have no way back.
    rule = ("from", hosts.second.address, "ipproto", "tcp", "sport", "17001", "blackhole")
    subprocess.run([*blocked, "add", "pref", "10", *rule], check=True)
    try:
        first = start(hosts.first, file, "--wait", "60")
        second = start(hosts.second, file, "--wait", "60")
        of_first, of_second = rows(first), rows(second)
    finally:
        subprocess.run([*blocked, "delete", "pref", "10"], check=True)
    assert of_first["host 2 ports"]["status"] == "failed"
    assert of_first["host 2 ports"]["seen"] == "not reached from here: 17001"
    assert "open them on node2 to node1" in of_first["host 2 ports"]["fix"]
    assert of_second["host 1 ports"]["status"] == "ok"


@pytest.mark.proof
def test_a_host_without_a_doctor_is_not_judged(hosts: Hosts, servers: Servers, tmp_path: Path) -> None:
    file = write_hosts(hosts, tmp_path, node1={"roles": {"agg": 1}}, node2={"roles": {"agg": 1}})
    found = rows(start(hosts.first, file, "--wait", "0.5"))
    assert found["host 2"]["status"] == "warning"
    assert "no doctor answers there" in found["host 2"]["seen"]
    assert not [name for name in found if name.startswith("host 2 ")]
