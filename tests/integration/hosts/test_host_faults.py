"""Faults of a topology over two hosts: what clients lose, and that it is whole again by itself.

``host_faults.py`` measures the same several times, for the table of docs/hosts-faults.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from host_faults import FAULTS, SHAPES, Fault, measure
from host_shares import ServedHosts, served_hosts
from host_topology import Servers
from namespaces import Hosts

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module", params=SHAPES)
def served(request: pytest.FixtureRequest, hosts: Hosts, servers: Servers) -> Iterator[ServedHosts]:
    shape = SHAPES[request.param]
    directory = hosts.directory / f"shape-{list(SHAPES).index(request.param)}"
    with served_hosts(hosts, servers, directory, *shape.arguments, **shape.of_hosts) as running:
        yield running


@pytest.mark.parametrize(
    ("served", "fault"),
    [pytest.param(fault.shape, fault, id=f"{fault.shape}: {fault.name}") for fault in FAULTS],
    indirect=["served"],
    scope="module",  # or pytest takes a test's own, and each fault would have a topology of its own
)
def test_no_request_is_lost_where_another_process_can_take_it_and_all_is_whole_again(
    served: ServedHosts, fault: Fault
) -> None:
    cost = measure(served, fault)
    if fault.has_no_other:
        assert cost.lost > 0
        return
    assert cost.streams_cut == 0, cost
    assert cost.lost <= fault.loses_at_most, cost
