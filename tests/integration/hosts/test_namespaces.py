"""Two hosts leave nothing behind, whatever ends the run that made them."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from namespaces import Hosts
from processes import until

_RUN = """
import os, subprocess, sys, time
from namespaces import two_hosts
with two_hosts() as hosts:
    children = []
    for host in hosts:
        with host.entered():
            children.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
    pids = [child.pid for child in children]
    print(hosts.first.namespace, hosts.second.namespace, hosts.directory, *pids, flush=True)
    time.sleep(600)
"""


def test_a_killed_run_leaves_no_namespace_no_process_and_no_file(hosts: Hosts) -> None:
    paths = [Path(__file__).parent, Path(__file__).parents[1]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.fspath, paths))}
    run = subprocess.Popen([sys.executable, "-c", _RUN], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert run.stdout is not None
        first, second, directory, *pids = run.stdout.readline().split()
        left = [Path("/run/netns", first), Path("/run/netns", second), Path(directory)]
        left += [Path("/proc", pid) for pid in pids]
        assert all(path.exists() for path in left)
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    until("nothing of it is left", lambda: not any(path.exists() for path in left), seconds=20)


def test_a_link_that_is_cut_carries_nothing_until_it_is_mended(hosts: Hosts) -> None:
    def arrives() -> bool:
        """A connection to a port on which nobody listens is refused, where it gets there."""
        with hosts.first.entered(), contextlib.suppress(TimeoutError), contextlib.closing(socket.socket()) as client:
            client.settimeout(1)
            return client.connect_ex((hosts.second.address, 9)) == errno.ECONNREFUSED
        return False

    assert arrives()
    hosts.second.cut()
    assert not arrives()
    hosts.second.mend()
    until("the link is back", arrives, seconds=20)
