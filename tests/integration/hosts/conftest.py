"""Two hosts for the tests of this directory, or the reason why there are none."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from host_answers import of_one_engine
from host_topology import Servers, servers_on
from namespaces import Hosts, lacking, two_hosts


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if reason := lacking():
        warnings.warn(f"NOT TESTED over hosts: {reason}", stacklevel=1)  # pytest -q shows warnings, and no skips
        pytest.skip(reason)
    with two_hosts() as made:
        yield made


@pytest.fixture(scope="module")
def servers(hosts: Hosts) -> Iterator[Servers]:
    with servers_on(hosts.first, hosts.directory) as started:
        yield started


@pytest.fixture(scope="session")
def expected() -> list[list[int]]:
    """What one engine says to each of ``host_answers.PROMPTS``."""
    return of_one_engine()
