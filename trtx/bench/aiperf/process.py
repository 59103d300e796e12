"""aiperf's processes: one that has it imported, for a whole run, and in it one call a trial."""

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
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trtx.bench.endpoint import API_KEY_VARIABLE
from trtx.bench.files import take_out
from trtx.bench.load import MAX_CONCURRENCY
from trtx.tls import CA_VARIABLE, trusted_beside

GRACE_S = 5.0
SCRATCH_PREFIX = "trtx-aiperf-"
KEPT_VARIABLE = "TRTX_AIPERF_KEPT"  # directory of what all calls of a run read (kept_corpus.py)
_KEPT = "kept"
_TRUSTED = "trusted.pem"
_SOCKET_PATH_BYTES = 107  # Linux's sun_path, its closing NUL aside
_BELOW_SCRATCH_BYTES = len(f"/{SCRATCH_PREFIX}12345678/tmp12345678/aiperf/dataset_manager_proxy_frontend.ipc")
# What aiperf's processes import for a run like ours, each anew: 7 s of CPU a trial where it takes 3 once and then 0.
_ENTRY = "aiperf.cli:app"
_PRELOAD = (
    "-torch",  # which transformers imports where it is there, 1.3 s of CPU, and a tokenizer needs not
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
)


class AiperfHost:
    """aiperf imported once, forked for each trial (``warm_host.py``). A context manager, which starts it at once: its
    imports take seconds, in which a topology starts.

    Leaving the context ends it, and removes its temporary directory, where aiperf's processes keep sockets and dataset
    files; aiperf talks to itself over Unix sockets there and listens on no port.
    """

    def __init__(
        self,
        log_path: Path,
        guard: Callable[[Path], Callable[[int], None]] = lambda scratch: lambda session: None,
        *,
        api_key: str | None = None,
        certificates: Sequence[Path] = (),
        program: Sequence[str] = (_ENTRY, *_PRELOAD),
    ) -> None:
        """``guard`` is for whoever ends all if we are killed. It gets the temporary directory before that is made, and
        what it returns gets the session of what was started: each process of it has ``TMPDIR`` set to that directory,
        in whatever session it is. ``api_key`` reaches our endpoint by the environment: a command line is for everybody
        to see. ``certificates``: PEM, of servers that are trusted beside those that are trusted here."""
        self.log_path = log_path
        self.api_key = api_key
        self._certificates = tuple(certificates)
        self._guard = guard
        self._program = tuple(program)
        self._unread = b""
        self.is_ready = False  # it has imported all, and takes calls

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
                env=_environment(self.scratch, self.api_key) | self._trust(),
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
        self._process.terminate()  # it may still import, which nobody needs any more; one that takes calls stays
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _trust(self) -> dict[str, str]:
        """aiperf 0.13 verifies a server as aiohttp does by default: what OpenSSL reads of the environment."""
        if not self._certificates:
            return {}
        file = self.scratch / _TRUSTED
        file.write_text(trusted_beside(self._certificates), encoding="ascii")
        return {CA_VARIABLE: str(file)}

    def call(self, argv: Sequence[str], log_path: Path) -> None:
        """Has it run once; :meth:`replies` says what became of it, also where the host has died."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write((json.dumps({"argv": list(argv), "log": str(log_path)}) + "\n").encode())
            self._process.stdin.flush()

    def replies(self, wait_s: float) -> list[dict[str, Any]]:
        """What it has said since, after ``wait_s`` at most; ``{"exit": code}`` of its own when it died."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            said = selector.select(wait_s)
        if not said:
            return []
        data = os.read(self._process.stdout.fileno(), 65536)
        if not data:
            return [{"exit": self._process.wait()}]
        *lines, self._unread = (self._unread + data).split(b"\n")
        found = [json.loads(line) for line in lines]
        self.is_ready = self.is_ready or bool(found)
        return [reply for reply in found if "ready" not in reply]

    def tidy(self) -> None:
        """Removes what a call that ended left in the temporary directory, but what the next one reads."""
        for path in self.scratch.glob("*"):
            if path.name in (_KEPT, _TRUSTED):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


class Aiperf:
    """One running aiperf call, in a session of its own, writing its console to a log. A context manager, which ends
    every process of that session when it is left.

    Where a server has written its key back into an error, it is taken out of all that lies beside the log, where aiperf
    writes.
    """

    def __init__(self, host: AiperfHost, argv: Sequence[str], log_path: Path) -> None:
        self.argv = tuple(argv)
        self._host = host
        self._log_path = log_path
        self._is_called = False  # the host was asked for it, which takes calls once it has imported all
        self._session: int | None = None  # None until the host has forked it
        self._exit_code: int | None = None

    def __enter__(self) -> Self:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_path.touch()  # whoever is told to read it finds it, also where the call is ended before its fork
        self._call_once_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.poll()
        deadline = time.monotonic() + GRACE_S
        while self._is_called and self._session is None and self.poll(0.05) is None:  # it forks within milliseconds
            if time.monotonic() > deadline:
                break
        self._end_session()
        self._host.tidy()
        if self._host.api_key is not None:  # aiperf keeps it out of what it writes, not out of a server's own words
            take_out(self._host.api_key, self._log_path.parent)

    def poll(self, wait_s: float = 0) -> int | None:
        """Exit code, negative for a signal, or None while it runs; waits for its end for ``wait_s`` at most."""
        if self._exit_code is None:
            for reply in self._host.replies(wait_s):
                self._session = reply.get("pid", self._session)
                self._exit_code = reply.get("exit")
            self._call_once_ready()
        return self._exit_code

    def _call_once_ready(self) -> None:
        """Not before: a call that waited in its pipe would be made after this one is left, and nobody would end it."""
        if self._host.is_ready and not self._is_called and self._exit_code is None:
            self._is_called = True
            self._host.call(self.argv, self._log_path)

    def _end_session(self) -> None:
        if self._session is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._session, number)  # the leader's children outlive it at times, so always all of them
            except ProcessLookupError:
                break
            deadline = time.monotonic() + GRACE_S
            while time.monotonic() < deadline and _group_lives(self._session):
                self.poll(0.05)
                time.sleep(0.01)
        deadline = time.monotonic() + GRACE_S
        while self.poll(0.05) is None and time.monotonic() < deadline:
            pass  # the host says so, and takes the next call then


def _short_directory() -> str:
    """The temporary directory, or /tmp where that is too long: a Unix socket's path has 107 bytes at most.

    aiperf puts its own under ``<ours>/<tempfile's>/aiperf/dataset_manager_proxy_frontend.ipc``.
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
    # With HF_HUB_OFFLINE set, aiperf 0.13.0 looks for a tokenizer in Hugging Face's cache only and refuses a
    # directory (Tokenizer._resolve_local_snapshot). Without it the directory is read as it is; an endpoint that
    # nothing listens on keeps every other look-up on this machine. Drop both when a release takes a directory.
    dropped = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", API_KEY_VARIABLE)
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {
        **kept,
        **({} if api_key is None else {API_KEY_VARIABLE: api_key}),
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "TMPDIR": str(scratch),
        KEPT_VARIABLE: str(scratch / _KEPT),
        # Its own limit, 2,500 to a worker process, would let the requests above it wait in the client, unseen.
        "AIPERF_HTTP_CONNECTION_LIMIT": str(MAX_CONCURRENCY),
        "COLUMNS": "120",
        "PYTHONIOENCODING": "utf-8",  # it prints its table's lines before it has written its result, or ends over them
        "NO_COLOR": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",  # that there is no torch
    }
