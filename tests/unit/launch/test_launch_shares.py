"""One host's share of a topology: what it says of others, its frontends, and an etcd or a NATS that is away."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launch_builders import plan_of, process
from test_launch_supervisor import History

from trtx.errors import UsageError
from trtx.launch import host_here
from trtx.launch.preconditions import Preconditions
from trtx.launch.route import FrontendStatus
from trtx.launch.run_directory import RunDirectory
from trtx.topology import EtcdService, NatsService, PlannedHost
from trtx.topology.plan import ProcessRole

HERE, THERE = PlannedHost("here", "127.0.0.1", "lo"), PlannedHost("there", "192.0.2.1", "eth1")


class Share(History):
    """One worker of this host, and two frontends, of this host or of another, which has workers of ``elsewhere``; the
    test gives the answers."""

    def __init__(
        self, tmp_path: Path, *elsewhere: ProcessRole, role: ProcessRole = "agg", has_frontends: bool = True
    ) -> None:
        own = f"{role}-0"
        super().__init__(tmp_path, own)
        frontends = [process(tmp_path, f"frontend-{number}", role="frontend") for number in range(2)]
        here = [replace(process(tmp_path, own, role=role), host="here")]
        there = [
            replace(process(tmp_path, f"{role}-{number}", role=role), host="there")
            for number, role in enumerate(elsewhere, start=1)
        ]
        whole = replace(plan_of(tmp_path, *frontends, *here, *there), hosts=(HERE, THERE))
        self.plan = replace(whole, this_host="here", processes=(*(frontends if has_frontends else ()), *here))
        self.routes = {one.name: FrontendStatus(whole, url=f"http://127.0.0.1:{n}") for n, one in enumerate(frontends)}
        self.answering = set(self.routes)
        self.supervise(routes=self.routes, whole=whole)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            for slot in self.supervisor.slots:
                if slot.spec.role == "frontend" and slot.state == "starting":
                    slot.state, slot.up_since = "up", self.now  # its port: tests/integration
            for name in self.answering:
                route = self.routes[name]
                route.answered_at = route.routed_at = route.proved_at = self.now
            super().run(0.25)

    def register_there(self, worker_id: int, role: ProcessRole = "agg") -> None:
        self.register(worker_id, host=THERE.address, component="prefill" if role == "prefill" else "backend")

    def lose(self, worker_id: int) -> None:
        for path in self.plan.discovery_dir.rglob(f"*{worker_id:x}"):
            path.unlink()

    def told(self, kind: str) -> list[str]:
        return [event.message for event in self.events if event.kind == kind]

    def lives(self) -> dict[str, int]:
        return {name: len(lives) for name, lives in self.children.items()}


def test_a_frontend_that_dies_is_started_again_and_whole_is_told_once_all_of_them_are_proved(tmp_path: Path) -> None:
    share = Share(tmp_path)
    share.serve()
    share.supervisor.mark_ready()
    share.run(1)
    share.children["frontend-1"][-1].code = -9
    share.answering.discard("frontend-1")
    share.run(3)
    assert share.lives() == {"frontend-0": 1, "frontend-1": 2, "agg-0": 1}
    assert share.told("recovered") == []
    share.answering.add("frontend-1")
    share.run(1)
    assert len(share.told("recovered")) == 1


def test_only_the_frontend_that_answers_nobody_is_killed(tmp_path: Path) -> None:
    share = Share(tmp_path)
    share.serve()
    share.supervisor.mark_ready()
    share.run(1)
    share.answering.discard("frontend-0")
    share.run(62)
    assert "frontend-0 was killed by trtx" in share.told("exited")[0]
    assert "frontend-1" not in "".join(share.told("exited"))


def test_a_frontend_whose_lease_has_ended_is_started_again_once_what_is_registered_is_known(tmp_path: Path) -> None:
    share = Share(tmp_path)
    share.serve()
    share.supervisor.mark_ready()
    share.run(1)
    known = share.supervisor.registry

    class Away:
        records_live_s = 10.0

        def worker_ids(self) -> set[int]:
            raise OSError("etcd is away")

    share.supervisor.registry = Away()  # type: ignore[assignment]
    with share.plan.frontends[0].log_path.open("a") as log:
        log.write("2026-11-23T04:22:00Z ERROR dynamo_runtime: Unable to maintain lease. Check etcd server status\n")
    share.run(2)
    assert share.told("exited") == []  # it could not register
    share.supervisor.registry = known
    share.run(1)
    (died,) = share.told("exited")
    assert "frontend-0 was killed by trtx" in died and "its lease in etcd has expired" in died
    share.run(3)
    assert share.lives() == {"frontend-0": 2, "frontend-1": 1, "agg-0": 1}
    assert len(share.told("recovered")) == 1


def test_workers_of_other_hosts_are_waited_for_missed_and_proved_again(tmp_path: Path) -> None:
    share = Share(tmp_path, "agg", "agg")
    share.serve()
    assert not share.supervisor.is_whole and share.supervisor.missing_workers == "1 of 3 workers are registered"
    share.register_there(0xCD)
    share.register_there(0xEF)
    assert share.supervisor.is_whole and share.supervisor.missing_workers == ""
    share.supervisor.mark_ready()
    share.run(1)
    share.lose(0xEF)
    share.run(1)
    assert share.told("lost") == [
        "workers of other hosts are gone: 2 of 3 workers are registered; the remaining workers continue to serve"
    ]
    assert share.told("recovered") == [] and share.lives() == {"frontend-0": 1, "frontend-1": 1, "agg-0": 1}
    share.register_there(0x99)
    share.run(1)
    assert len(share.told("recovered")) == 1


def test_its_own_worker_that_died_is_not_told_as_another_hosts(tmp_path: Path) -> None:
    share = Share(tmp_path, "agg")
    share.serve()
    share.register_there(0xCD)
    share.supervisor.mark_ready()
    share.run(1)
    share.children["agg-0"][-1].code = -9
    share.run(2)
    assert share.told("lost") == []


def test_workers_of_other_hosts_are_told_with_those_of_this_one_that_etcd_lost_with_them(tmp_path: Path) -> None:
    share = Share(tmp_path, "agg")
    share.serve()
    share.register_there(0xCD)
    share.supervisor.mark_ready()
    share.run(1)
    share.lose(0xAB)
    share.lose(0xCD)
    share.run(1)
    assert share.told("lost") == [
        "workers of other hosts and of this one are gone: 0 of 2 workers are registered; no agg worker is left on any "
        "host, so requests are refused until there is one"
    ]


def test_its_own_worker_that_etcd_took_out_is_not_told_as_another_hosts(tmp_path: Path) -> None:
    share = Share(tmp_path, "prefill", role="decode", has_frontends=False)
    share.serve("decode-0")
    share.register_there(0xCD, "prefill")
    share.supervisor.mark_ready()
    share.run(1)
    share.lose(0xAB)
    share.run(1)  # it lives, and is ended only later
    assert share.told("lost") == [] and not share.supervisor.is_whole
    share.run(2)
    assert len(share.told("vanished")) == 1 and share.told("lost") == []


def test_a_role_of_which_no_worker_is_left_is_told_as_what_requests_are_refused_for(tmp_path: Path) -> None:
    share = Share(tmp_path, "decode", "decode", role="prefill")
    share.serve("prefill-0")
    path = next(share.plan.discovery_dir.rglob(f"instances/*{0xAB:x}"))
    path.write_text(path.read_text().replace("backend", "prefill"))
    share.register_there(0xCD, "decode")
    share.register_there(0xEF, "decode")
    share.supervisor.mark_ready()
    share.run(1)
    share.lose(0xCD)
    share.run(1)
    share.lose(0xEF)
    share.run(1)
    share.register_there(0x99, "decode")
    share.run(1)
    assert share.told("lost") == [
        "workers of other hosts are gone: 2 of 3 workers are registered; the remaining workers continue to serve",
        "workers of other hosts are gone: 1 of 3 workers are registered; no decode worker is left on any host, so "
        "requests are refused until there is one",
        "workers of other hosts are gone: 2 of 3 workers are registered; the remaining workers continue to serve",
    ]
    assert share.told("recovered") == []


def test_records_of_a_dead_worker_of_this_host_do_not_stand_for_a_worker_of_another(tmp_path: Path) -> None:
    share = Share(tmp_path, "agg")
    share.serve()
    share.register(0x77)
    assert share.supervisor.missing_workers == "1 of 2 workers are registered" and not share.supervisor.is_whole
    share.register_there(0xCD)
    assert share.supervisor.missing_workers == "" and share.supervisor.is_whole


def test_a_worker_that_is_stopped_is_started_again_long_before_its_lease_ends(tmp_path: Path) -> None:
    share = Share(tmp_path)
    share.serve()
    share.supervisor.mark_ready()
    share.supervisor._plan = replace(share.plan, etcd=EtcdService((), 600, host_lease_ttl_s=30))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as sleeper:
        try:
            os.kill(sleeper.pid, signal.SIGSTOP)
            os.waitpid(sleeper.pid, os.WUNTRACED)
            share.children["agg-0"][0].pid = sleeper.pid
            share.run(28)
            assert share.told("vanished") == []
            share.run(4)
        finally:
            sleeper.kill()
    (told,) = share.told("vanished")
    assert "is alive, but it is stopped (by SIGSTOP or a debugger), for 30 s; it is started again" in told
    assert share.lives()["agg-0"] == 2


def test_a_host_without_a_frontend_tells_whole_again_once_every_frontend_of_the_others_proved_it(
    tmp_path: Path,
) -> None:
    share = Share(tmp_path, "agg", has_frontends=False)
    share.serve()
    share.register_there(0xCD)
    share.supervisor.mark_ready()
    share.run(1)
    share.answering.discard("frontend-1")
    share.lose(0xCD)
    share.run(1)
    share.register_there(0x99)
    share.run(5)
    assert len(share.told("lost")) == 1 and share.told("recovered") == []  # counted, and proved by one of two
    share.routes["frontend-1"].handoff_problem = "no KV came"
    share.run(1)
    assert share.told("unproved") == ["every process here is up, but at another host's frontend-1: no KV came"]
    share.answering.add("frontend-1")
    share.run(1)
    assert share.told("recovered") == ["the topology is whole again: a request went through"]
    assert share.lives() == {"agg-0": 1} and share.told("vanished") == []


def test_a_frontend_of_another_host_that_counts_not_every_worker_is_told_and_not_ended(tmp_path: Path) -> None:
    share = Share(tmp_path, has_frontends=False)
    share.serve()
    share.supervisor.mark_ready()
    share.run(1)
    share.answering.clear()
    share.routes["frontend-0"].problem = "0 of 1 agg"
    share.children["agg-0"][-1].code = -9
    share.run(2)
    share.serve(worker_id=0xCD)
    share.run(29)
    assert share.told("unproved") == []
    share.run(40)
    (told,) = share.told("unproved")
    assert "another host's frontend-0: it does not count every registered worker (0 of 1 agg)" in told
    assert "frontend-1" in told and share.told("recovered") == [] and share.told("vanished") == []


def over_hosts(tmp_path: Path, etcd_port: int, nats_port: int) -> Preconditions:
    plan = replace(
        plan_of(tmp_path, process(tmp_path, "agg-0")),
        discovery="etcd",
        etcd=EtcdService((f"http://127.0.0.1:{etcd_port}",), 90),
        nats=NatsService(f"nats://127.0.0.1:{nats_port}"),
    )
    return Preconditions(plan, RunDirectory(plan), None)


def test_nothing_starts_while_etcd_or_nats_takes_no_connection(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        there, also = one.getsockname()[1], other.getsockname()[1]
        assert over_hosts(tmp_path, there, also)() is None
        other.close()
        assert f"NATS at nats://127.0.0.1:{also} takes no connection" in str(over_hosts(tmp_path, there, also)())
    assert f"etcd at http://127.0.0.1:{there} takes no connection" in str(over_hosts(tmp_path, there, also)())


def test_this_machine_is_the_host_whose_address_it_has() -> None:
    assert host_here((THERE, HERE), None) == host_here((THERE, HERE), "here") == "here"
    with pytest.raises(UsageError, match="--this-host there has address 192.0.2.1, but this machine does not"):
        host_here((THERE, HERE), "there")
    with pytest.raises(UsageError, match="none of the hosts' addresses: 192.0.2.1"):
        host_here((THERE,), None)
    with pytest.raises(UsageError, match="several of the hosts' addresses"):
        host_here((HERE, PlannedHost("also", "127.0.0.1", "lo")), None)
