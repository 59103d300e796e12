"""Doctors of several hosts meet, each on a loopback address of its own: what each learns of the others' ports."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from doctor_hosts import report
from processes import free_port

from trtx.doctor.gather.meeting import PortListener, meet
from trtx.doctor.host_facts import Met, PortSpan, WantedHost

pytestmark = pytest.mark.slow


def host(number: int, ports: int = 3) -> WantedHost:
    span = PortSpan((), tuple(free_port() for _ in range(ports)))
    return WantedHost(f"node{number}", f"127.0.0.{number}", (), 0, span)


def doctor(own: WantedHost, others: list[WantedHost], *, wait_s: float, late_s: float = 0.0) -> dict[str, Met]:
    number = int(own.name.removeprefix("node"))

    with PortListener(own, others, lambda: replace(report(number), time_s=time.time() + late_s)) as listener:
        return meet(own, others, listener, wait_s=wait_s)


def at_once(*doctors: Callable[[], dict[str, Met]]) -> list[dict[str, Met]]:
    found: dict[int, dict[str, Met]] = {}

    def run(number: int, one: Callable[[], dict[str, Met]]) -> None:
        found[number] = one()

    threads = [threading.Thread(target=run, args=entry) for entry in enumerate(doctors)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(len(doctors))]


def test_each_learns_that_every_port_of_the_other_is_reached_and_what_time_it_is_there() -> None:
    first, second = host(1), host(2)
    of_first, of_second = at_once(
        lambda: doctor(first, [second], wait_s=30), lambda: doctor(second, [first], wait_s=30, late_s=-5.0)
    )
    assert set(of_first["node2"].ports.values()) == {"answered"}
    assert set(of_second["node1"].ports.values()) == {"answered"}
    told = of_first["node2"].report
    assert told is not None and told.host == "node2"
    ahead, within = of_first["node2"].ahead_s, of_first["node2"].within_s
    assert ahead is not None
    assert abs(ahead + 5.0) <= within + 0.01
    assert of_second["node1"].ahead_s == pytest.approx(0.0, abs=of_second["node1"].within_s + 0.01)


def test_a_port_that_something_else_has_is_told_from_one_that_is_reached() -> None:
    first, second = host(1), host(2)
    with socket.socket() as foreign:
        foreign.bind((second.address, second.ports.planned[1]))
        foreign.listen()
        of_first, _ = at_once(lambda: doctor(first, [second], wait_s=30), lambda: doctor(second, [first], wait_s=30))
    states = of_first["node2"].ports
    assert [states[port] for port in second.ports.planned] == ["answered", "other", "answered"]


def test_where_no_doctor_runs_ports_are_refused_and_nothing_else_is_known() -> None:
    first, second = host(1), host(2)
    (found,) = at_once(lambda: doctor(first, [second], wait_s=0.3))
    assert found["node2"] == Met(dict.fromkeys(second.ports.all, "refused"))


def test_a_host_that_is_not_of_the_file_is_told_nothing() -> None:
    first, second = host(1), host(2)
    with (
        PortListener(first, [second], lambda: report(1)),
        socket.create_connection((first.address, first.ports.planned[0]), source_address=("127.0.0.9", 0)) as stranger,
    ):
        stranger.settimeout(30)
        with pytest.raises(ConnectionError):
            stranger.sendall(b'{"trtx_doctor": "node2"}\n')
            if not stranger.recv(1):
                raise ConnectionResetError
    with socket.socket() as again:  # its ports are free once it has ended
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind((first.address, first.ports.planned[0]))


def test_what_answers_with_anything_but_a_report_is_something_else() -> None:
    first, second = host(1, ports=1), host(2, ports=1)
    with socket.socket() as odd:
        odd.bind((second.address, second.ports.planned[0]))
        odd.listen()

        def answer() -> None:
            for _ in range(2):
                connection, _ = odd.accept()
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        (found,) = at_once(lambda: doctor(first, [second], wait_s=0.0))
    assert found["node2"] == Met({second.ports.planned[0]: "other"})
