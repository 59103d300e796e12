"""aiperf's processes: a host that imports aiperf once per run, and one call per trial that the host forks."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trtx.bench.endpoint import API_KEY_VARIABLE
from trtx.bench.files import take_out
from trtx.bench.load import MAX_CONCURRENCY
from trtx.tls import CA_VARIABLE, trusted_beside

GRACE_S = 5.0
SCRATCH_PREFIX = "trtx-aiperf-"
KEPT_VARIABLE = "TRTX_AIPERF_KEPT"  # directory of files that all calls of a run share (kept_corpus.py)
_KEPT = "kept"
_TRUSTED = "trusted.pem"
_SOCKET_PATH_BYTES = 107  # size of Linux's sun_path without the terminating NUL
_BELOW_SCRATCH_BYTES = len(f"/{SCRATCH_PREFIX}12345678/tmp12345678/aiperf/dataset_manager_proxy_frontend.ipc")
# Modules that every aiperf process imports for a trtx run. Importing them once costs 3 s of CPU; without the host, each
# trial would cost 7 s.
_ENTRY = "aiperf.cli:app"
_PRELOAD = (
    "-torch",  # transformers imports torch if installed (1.3 s of CPU); tokenizers don't need it
    "aiperf.cli_commands.profile",
    "aiperf.cli_runner._single_run",
    "aiperf.common.tokenizer",
    "trtx.bench.aiperf.local_tokenizer",
    "trtx.bench.aiperf.kept_corpus",
    "trtx.bench.aiperf.no_redirects",
    "aiperf.controller.system_controller",
    "aiperf.dataset.composer",
    "aiperf.dataset.dataset_manager",
    "aiperf.metrics.accumulator",
    "aiperf.records.record_processor_service",
    "aiperf.records.records_manager",
    "aiperf.server_metrics.parquet_exporter",
    "aiperf.timing.manager",
    "aiperf.workers.worker",
    "aiperf.workers.worker_manager",
    "transformers.models.auto.tokenization_auto",
    "trtx.bench.endpoint.chat",
    "trtx.bench.endpoint.naming",
    "trtx.bench.endpoint.formats",
)


class AiperfHost:
    """A process that imports aiperf once and forks it for each trial (``warm_host.py``).

    A context manager. Entering starts the process at once, so that its imports (seconds) overlap with the start of the
    topology. Leaving ends the process and removes its temporary directory, in which aiperf's processes keep sockets and
    dataset files. aiperf communicates internally over Unix sockets in this directory and listens on no port.
    """

    def __init__(
        self,
        log_path: Path,
        guard: Callable[[Path], Callable[[int], None]] = lambda scratch: lambda session: None,
        *,
        api_key: str | None = None,
        certificates: Sequence[Path] = (),
        variables: Mapping[str, str] | None = None,
        program: Sequence[str] = (_ENTRY, *_PRELOAD),
    ) -> None:
        """Creates the host without starting it.

        ``guard`` registers processes for cleanup in case this process is killed. It is called with the temporary
        directory before that directory exists, and returns a function that is called with the session id of the started
        host. All processes that the host starts have ``TMPDIR`` set to the directory, whatever session they are in.

        ``api_key`` is passed to trtx's endpoint in the environment, because command lines are visible to all users.
        ``certificates`` are PEM files of servers to trust, in addition to those that this machine trusts.
        ``variables`` are environment variables of aiperf, in addition to those that every run sets.
        """
        self.log_path = log_path
        self.api_key = api_key
        self._certificates = tuple(certificates)
        self._variables = dict(variables or {})
        self._guard = guard
        self._program = tuple(program)
        self._unread = b""
        self.is_ready = False  # all imports are done and the host accepts calls

    def __enter__(self) -> Self:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.scratch = Path(_short_directory(), f"{SCRATCH_PREFIX}{secrets.token_hex(4)}")
        watch = self._guard(self.scratch)
        self.scratch.mkdir(mode=0o700)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trtx.bench.aiperf.warm_host", *self._program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(self.scratch, self.api_key) | self._variables | self._trust(),
                start_new_session=True,
            )
        watch(self._process.pid)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.terminate()  # it may still be importing; once it accepts calls, it blocks SIGTERM
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _trust(self) -> dict[str, str]:
        """Environment variable with the certificates to trust.

        aiperf 0.13 verifies servers as aiohttp does by default: with the certificates that OpenSSL finds through the
        environment.
        """
        if not self._certificates:
            return {}
        file = self.scratch / _TRUSTED
        file.write_text(trusted_beside(self._certificates), encoding="ascii")
        return {CA_VARIABLE: str(file)}

    def call(self, argv: Sequence[str], log_path: Path) -> None:
        """Requests one run. :meth:`replies` returns its outcome, also if the host has died."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write((json.dumps({"argv": list(argv), "log": str(log_path)}) + "\n").encode())
            self._process.stdin.flush()

    def replies(self, wait_s: float) -> list[dict[str, Any]]:
        """The host's new replies, after at most ``wait_s`` seconds; ``{"exit": code}`` with its own exit code if it
        died.
        """
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            ready = selector.select(wait_s)
        if not ready:
            return []
        data = os.read(self._process.stdout.fileno(), 65536)
        if not data:
            return [{"exit": self._process.wait()}]
        *lines, self._unread = (self._unread + data).split(b"\n")
        found = [json.loads(line) for line in lines]
        self.is_ready = self.is_ready or bool(found)
        return [reply for reply in found if "ready" not in reply]

    def tidy(self) -> None:
        """Removes a finished call's files from the temporary directory, except those that the next call reads."""
        for path in self.scratch.glob("*"):
            if path.name in (_KEPT, _TRUSTED):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


class Aiperf:
    """One running aiperf call in its own session, with its console output in a log.

    A context manager. Leaving it ends every process of that session. If a server has echoed the API key in an error
    message, the key is removed from all files next to the log, which is where aiperf writes.
    """

    def __init__(self, host: AiperfHost, argv: Sequence[str], log_path: Path) -> None:
        self.argv = tuple(argv)
        self._host = host
        self._log_path = log_path
        self._is_called = False  # the call was sent to the host, which accepts calls once its imports are done
        self._session: int | None = None  # None until the host has forked it
        self._exit_code: int | None = None

    def __enter__(self) -> Self:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_path.touch()  # the log exists even if the call ends before its fork
        self._call_once_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.poll()
        deadline = time.monotonic() + GRACE_S
        while self._is_called and self._session is None and self.poll(0.05) is None:  # the fork takes milliseconds
            if time.monotonic() > deadline:
                break
        self._end_session()
        self._host.tidy()
        if self._host.api_key is not None:  # aiperf redacts the key, but not in messages from the server
            take_out(self._host.api_key, self._log_path.parent)

    def poll(self, wait_s: float = 0) -> int | None:
        """The exit code (negative for a signal), or None while aiperf runs. Waits at most ``wait_s`` seconds for the
        end.
        """
        if self._exit_code is None:
            for reply in self._host.replies(wait_s):
                self._session = reply.get("pid", self._session)
                self._exit_code = reply.get("exit")
            self._call_once_ready()
        return self._exit_code

    def _call_once_ready(self) -> None:
        """Sends the call once the host is ready. A call that waited in the pipe could start after this context has
        ended, and nothing would end it.
        """
        if self._host.is_ready and not self._is_called and self._exit_code is None:
            self._is_called = True
            self._host.call(self.argv, self._log_path)

    def _end_session(self) -> None:
        if self._session is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._session, number)  # children may outlive the leader, so signal the whole group
            except ProcessLookupError:
                break
            deadline = time.monotonic() + GRACE_S
            while time.monotonic() < deadline and _group_lives(self._session):
                self.poll(0.05)
                time.sleep(0.01)
        deadline = time.monotonic() + GRACE_S
        while self.poll(0.05) is None and time.monotonic() < deadline:
            pass  # wait for the host to report the end, so that it accepts the next call


def _short_directory() -> str:
    """The temporary directory, or /tmp if its path is too long: a Unix socket's path has at most 107 bytes.

    aiperf creates its own sockets as ``<scratch>/<tempfile's>/aiperf/dataset_manager_proxy_frontend.ipc``.
    """
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= _SOCKET_PATH_BYTES - _BELOW_SCRATCH_BYTES else "/tmp"


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _environment(scratch: Path, api_key: str | None) -> dict[str, str]:
    # With HF_HUB_OFFLINE set, aiperf 0.13.0 looks for a tokenizer only in Hugging Face's cache and refuses a directory
    # (Tokenizer._resolve_local_snapshot). Without the variable it reads the directory. HF_ENDPOINT names a port without
    # a listener, so that no other look-up leaves this machine. Remove both once a release accepts a directory.
    dropped = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", API_KEY_VARIABLE)
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {
        **kept,
        **({} if api_key is None else {API_KEY_VARIABLE: api_key}),
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "TMPDIR": str(scratch),
        KEPT_VARIABLE: str(scratch / _KEPT),
        # aiperf 0.13.0's default of 2,500 per worker process would queue further requests in the client, unseen.
        "AIPERF_HTTP_CONNECTION_LIMIT": str(MAX_CONCURRENCY),
        "COLUMNS": "120",
        # aiperf prints its table before it writes its result, and must be able to encode it.
        "PYTHONIOENCODING": "utf-8",
        "NO_COLOR": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",  # silences the warning that torch is missing
    }
