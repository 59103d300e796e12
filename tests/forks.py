"""``--forks N``: runs the test files in N processes that are forked after the tests were collected.

pytest imports and collects once, and the forked processes have the result. A process takes one file after another.
Processes that each collect for themselves, such as pytest-xdist's, would cost 30 s of CPU each.
"""

from __future__ import annotations

import itertools
import os
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

Reports = list[tuple[str, Any]]
File = list[pytest.Item]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=1, metavar="N", help="run the test files in N forked processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    options = session.config.option
    if options.forks < 2 or options.collectonly or session.testsfailed:
        return None  # pytest's own loop
    files = [list(items) for _, items in itertools.groupby(session.items, lambda item: item.path)]
    _Forks(session, files).run(min(options.forks, len(files)))
    return True


@dataclass
class _Fork:
    """One process, as the parent sees it."""

    pid: int
    connection: Connection
    place: int
    files: deque[int] = field(default_factory=deque)  # the one that it runs, and perhaps the next one
    last: str = "its start"  # the last test that it reported


class _Forks:
    def __init__(self, session: pytest.Session, files: list[File]) -> None:
        self._session = session
        self._files = files
        self._left = deque(range(len(files)))
        self._forks: dict[Connection, _Fork] = {}
        self._free_places: set[int] = set()

    def run(self, number: int) -> None:
        self._session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # its numbered directory
        self._free_places = set(range(number))
        os.environ["PYTEST_FORKS"] = str(number)
        if (trees := sys.modules.get("source_trees")) is not None:
            trees.parse()  # once here, instead of in each process that runs a test of the sources
        try:
            for _ in range(number):
                self._start()
            while self._forks:
                for ready in wait(list(self._forks)):
                    fork = self._forks[ready]  # type: ignore[index]
                    try:
                        kind, content = fork.connection.recv()
                    except (EOFError, OSError):
                        self._ended(fork)
                    else:
                        self._received(fork, kind, content)
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
        finally:
            for fork in self._forks.values():
                fork.connection.close()
            for fork in self._forks.values():
                os.waitpid(fork.pid, 0)

    def _start(self) -> None:
        ours, theirs = Pipe()
        place = self._free_places.pop()
        if (pid := os.fork()) == 0:
            os.environ["PYTEST_FORK"] = str(place)  # the share of ports that its tests draw from
            ours.close()
            for other in self._forks:
                other.close()
            _run_files(self._session, self._files, theirs)
        theirs.close()
        self._forks[ours] = _Fork(pid, ours, place)

    def _received(self, fork: _Fork, kind: str, content: Any) -> None:
        hook, config = self._session.config.hook, self._session.config
        if kind == "wants a file":
            index = self._left.popleft() if self._left else None
            if index is not None:
                fork.files.append(index)
            with suppress(OSError):  # one that has died is noticed when it is read from
                fork.connection.send(index)
        elif kind == "finished a file":
            fork.files.popleft()
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=config, data=content)
            fork.last = report.nodeid
            hook.pytest_runtest_logreport(report=report)
        else:
            message, nodeid = content
            hook.pytest_warning_recorded.call_historic(
                kwargs={"warning_message": message, "nodeid": nodeid, "when": "runtest", "location": None}
            )

    def _ended(self, fork: _Fork) -> None:
        """Reports the file in which a process died, and starts another process for the files that are left."""
        del self._forks[fork.connection]
        _, status = os.waitpid(fork.pid, 0)
        self._free_places.add(fork.place)
        if status or fork.files:
            name = (
                self._files[fork.files.popleft()][0].nodeid.partition("::")[0] if fork.files else "a process of --forks"
            )
            why = f"{name} did not finish: its process ended with {os.waitstatus_to_exitcode(status)} after {fork.last}"
            report = pytest.TestReport(name, (name, None, name), {}, "failed", why, "call")
            self._session.config.hook.pytest_runtest_logreport(report=report)
        self._left.extendleft(reversed(fork.files))
        if self._left:
            self._start()


class _Sender:
    """A process's reports and warnings, sent to the parent instead of written."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection
        self.registered = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed and not self._config.getoption("durations"):
            return
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, nodeid: str) -> None:
        if not self.registered:
            return  # registering repeats the warnings that were recorded before
        one = warning_message
        text = warnings.WarningMessage(str(one.message), one.category, one.filename, one.lineno)  # picklable
        self._connection.send(("warning", (text, nodeid)))


def _run_files(session: pytest.Session, files: list[File], connection: Connection) -> None:
    """Runs files in a forked process until there are no more; never returns."""
    status = 1
    try:
        config = session.config
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(sender := _Sender(config, connection))
        sender.registered = True
        _own_capture(config)
        _own_temporary_directory(config)
        try:
            for item, following in _items(files, connection):
                config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if following is None or following.path != item.path:
                    connection.send(("finished a file", None))
        finally:
            session._setupstate.teardown_exact(None)
        status = 0
    except KeyboardInterrupt:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _items(files: list[File], connection: Connection) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """Each test with the one after it, which says what fixtures outlive it. A file is asked for when the last test of
    the one before begins."""

    def next_file() -> File | None:
        connection.send(("wants a file", None))
        index = connection.recv()
        return None if index is None else files[index]

    current = next_file()
    while current:
        yield from itertools.pairwise(current)
        following = next_file()
        yield current[-1], following[0] if following else None
        current = following


def _own_capture(config: pytest.Config) -> None:
    """Forked processes would share the file that output is captured in, and the position in it."""
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()


def _own_temporary_directory(config: pytest.Config) -> None:
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"process-{os.getpid()}"
    factory._basetemp.mkdir()
