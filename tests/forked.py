"""``--processes N``: the tests run in N processes, forked from the one that imported and collected them.

Processes that are started anew would each import torch, transformers and aiperf and collect 10,000 tests: 20 s of CPU
for each. A process takes the tests of one file after the other, so that fixtures of a module are made once."""

from __future__ import annotations

import itertools
import os
import signal
import struct
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

import pytest

_NUMBER = struct.Struct("H")  # of a file in the queue


def run_forked(session: pytest.Session, processes: int) -> None:
    """Runs the session's tests in forked processes and reports what they report."""
    files = [list(items) for _, items in itertools.groupby(session.items, key=lambda item: item.path)]
    queue = _queue(len(files))
    directory = session.config._tmp_path_factory.getbasetemp()
    running: dict[Connection, _Process] = {}
    processes = min(processes, len(files))
    for number in range(processes):
        receiver, sender = Pipe(duplex=False)
        pid = os.fork()
        if not pid:
            # As pytest-xdist says it, by which tests share out ports.
            os.environ.update(PYTEST_XDIST_WORKER=f"gw{number}", PYTEST_XDIST_WORKER_COUNT=str(processes))
            _run_in_child(session, _taken(files, queue), directory / f"process-{number}", sender)
        sender.close()
        running[receiver] = _Process(session, pid)
    os.close(queue)
    try:
        while running:
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                if not running[connection].receive(connection):
                    running.pop(connection).end()
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    finally:
        for process in running.values():
            os.kill(process.pid, signal.SIGINT)
        for process in running.values():
            os.waitpid(process.pid, 0)


def _queue(count: int) -> int:
    """A pipe with the numbers of all files, which processes read one at a time: it is empty when all are taken."""
    reader, writer = os.pipe()
    os.write(writer, b"".join(_NUMBER.pack(number) for number in range(count)))
    os.close(writer)
    return reader


def _taken(files: list[list[pytest.Item]], queue: int) -> Iterator[pytest.Item]:
    """The tests of the files that this process takes from the queue."""
    while number := os.read(queue, _NUMBER.size):
        yield from files[_NUMBER.unpack(number)[0]]


class _Process:
    """A forked process, as the one that forked it sees it."""

    def __init__(self, session: pytest.Session, pid: int) -> None:
        self.pid = pid
        self._config = session.config
        self._test: tuple[str, tuple[str, int | None, str]] | None = None
        self._ended = False

    def receive(self, connection: Connection) -> bool:
        """Whether the process had something to report, which is passed on to pytest."""
        try:
            kind, content = connection.recv()
        except EOFError:
            return False
        hook = self._config.hook
        match kind:
            case "started":
                self._test = content
            case "report":
                report = hook.pytest_report_from_serializable(config=self._config, data=content)
                hook.pytest_runtest_logreport(report=report)
            case "finished":
                nodeid, location = content
                hook.pytest_runtest_logfinish(nodeid=nodeid, location=location)
            case "warning":
                text, filename, line, when, nodeid = content
                message = warnings.WarningMessage(UserWarning(text), UserWarning, filename, line)
                of_test = {"warning_message": message, "when": when, "nodeid": nodeid, "location": None}
                hook.pytest_warning_recorded.call_historic(kwargs=of_test)
            case "ended":
                self._ended = True
        return True

    def end(self) -> None:
        """Waits for the process, and fails the test at which it died."""
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self._ended:
            return
        nodeid, location = self._test or ("no test yet", ("", None, ""))
        what = f"the process that ran this test ended with {status}; other tests of its file may not have run"
        report = pytest.TestReport(nodeid, location, {}, "failed", what, "call")
        self._config.hook.pytest_runtest_logreport(report=report)


class _Reporter:
    """Sends what the tests of a forked process report."""

    def __init__(self, config: pytest.Config, sender: Connection) -> None:
        self._config = config
        self._sender = sender

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._sender.send(("started", (nodeid, location)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        content = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._sender.send(("report", content))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._sender.send(("finished", (nodeid, location)))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str) -> None:
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        self._sender.send(("warning", (text, warning_message.filename, warning_message.lineno, when, nodeid)))


def _run_in_child(session: pytest.Session, items: Iterator[pytest.Item], directory: Path, sender: Connection) -> None:
    """Runs the tests and ends this process. ``directory`` is for its temporary files."""
    status = 1
    try:
        config = session.config
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()  # into files of its own
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(_Reporter(config, sender))
        directory.mkdir(mode=0o700)
        config._tmp_path_factory._basetemp = directory
        try:
            _run_all(session, items)
            status = 0
        finally:
            session._setupstate.teardown_exact(None)  # if it was interrupted
        sender.send(("ended", None))
    finally:
        os._exit(status)


def _run_all(session: pytest.Session, items: Iterator[pytest.Item]) -> None:
    item = next(items, None)
    while item is not None and not session.shouldfail and not session.shouldstop:
        following = next(items, None)  # before this one runs: fixtures that the next one uses too stay
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        item = following
