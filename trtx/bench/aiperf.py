"""The aiperf process: its command line, its environment, where it puts its files, and its end.

Facts here are of aiperf 0.13.0.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import dropwhile, takewhile
from pathlib import Path
from types import TracebackType
from typing import Self

from trtx.bench.answers import words
from trtx.bench.endpoint import API_KEY_VARIABLE, ENDPOINT_TYPE, ENTRY_POINT, ENTRY_POINT_GROUP
from trtx.bench.files import take_out
from trtx.bench.load import Load, LoadSpec, Target
from trtx.errors import UsageError

GRACE_S = 5.0
SCRATCH_PREFIX = "trtx-aiperf-"
_SOCKET_PATH_BYTES = 107  # Linux's sun_path, its closing NUL aside
_BELOW_SCRATCH_BYTES = len(f"/{SCRATCH_PREFIX}12345678/tmp12345678/aiperf/dataset_manager_proxy_frontend.ipc")
_READY_FILE = ".aiperf_results_ready.json"  # the last file that aiperf writes for one run
# Where cores are few, aiperf shares them with what it measures, so it is asked to get along with little:
# - one worker process, which carries some thousand tokens/s;
# - a request rate that no such machine reaches. With a concurrency alone, aiperf 0.13.0 asks without a pause whether a
#   request has ended while all are under way (RequestRateStrategy.execute_phase), which keeps a core busy for the whole
#   run. With a rate of 1,000/s it asks every ms, so the next request is sent at most 1 ms late.
# The rate can go with a release of aiperf that waits for a request's end in place of asking.
_FEW_CORES = 4
_SAVING = ("--workers-max", "1", "--request-rate", "1000", "--arrival-pattern", "constant")


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The directory that aiperf writes for one (load, trial)."""

    load: Load
    trial: int  # from 1
    directory: Path

    @property
    def started(self) -> bool:
        return self.directory.exists()

    @property
    def ended(self) -> bool:
        return (self.directory / _READY_FILE).exists()


def run_files(staging: Path, loads: Sequence[Load], trials: int) -> tuple[RunFiles, ...]:
    """Where one call's runs lie under its artifact directory, in the order in which aiperf makes them.

    Trials are the outer loop (aiperf's "repeated"), so that a slow drift of the machine meets every load alike.
    """
    runs = []
    for trial in range(1, trials + 1):
        for load in loads:
            if len(loads) > 1 and trials > 1:
                directory = staging / "profile_runs" / f"trial_{trial:04d}" / load.label
            elif len(loads) > 1:
                directory = staging / load.label
            elif trials > 1:
                directory = staging / load.label / "profile_runs" / f"run_{trial:04d}"
            else:
                directory = staging / load.label
            runs.append(RunFiles(load, trial, directory))
    return tuple(runs)


def check_endpoint() -> None:
    """Raises UsageError where aiperf would not find our endpoint, before anything is started for it to measure."""
    if not entry_points(group=ENTRY_POINT_GROUP, name=ENTRY_POINT):
        raise UsageError(
            f"the installed trtx does not offer aiperf its endpoint {ENDPOINT_TYPE!r} (entry point {ENTRY_POINT!r} of "
            f"{ENTRY_POINT_GROUP!r}), without which no answer is checked; install trtx again (make setup, pip install)"
        )


def command(target: Target, spec: LoadSpec, loads: Sequence[Load], staging: Path) -> tuple[str, ...]:
    """One aiperf call for ``loads``, some or all of the spec's, and their trials, on one topology."""
    argv = [
        sys.executable, "-m", "aiperf", "profile",
        "--model", target.model,
        "--tokenizer", str(target.tokenizer_path),
        "--url", target.url,
        "--endpoint-type", ENDPOINT_TYPE,
        "--isl", str(spec.isl),
        "--osl", str(spec.osl),
        # Lengths as the server sees them: prompts are made shorter by the chat template's own tokens, and counts come
        # from the answers' usage, because tokens sampled past a model's own ending do not survive being re-encoded.
        "--apply-chat-template",
        "--use-server-token-count",
        *_seeding(spec, loads),
        # One prompt a request, warm-up included, or later ones would be found in the prefix cache. As many for a part
        # of the spec's loads as for all of them: a cell that is measured anew gets the prompts that it would have had.
        "--num-dataset-entries", str(max(load.warmup_request_count + load.request_count for load in spec.loads)),
        "--request-timeout-seconds", str(spec.request_timeout_s),
        "--extra-inputs", json.dumps(spec.request_body),
        "--ui", "none",
        "--no-gpu-telemetry",
        "--no-server-metrics",
    ]  # fmt: skip
    if spec.streaming:
        argv += ["--streaming"]
    if len(os.sched_getaffinity(0)) <= _FEW_CORES:
        argv += _SAVING
    if spec.trials > 1:
        argv += ["--num-profile-runs", str(spec.trials), "--no-profile-run-disable-warmup-after-first"]
    return (*argv, *_loads(loads, staging))


def _seeding(spec: LoadSpec, loads: Sequence[Load]) -> list[str]:
    """Each trial draws its own prompts, or the second would find all of the first's in the prefix cache.

    aiperf derives a run's seed from (seed, label, trial), hence the same prompts in every mode. A call for one load has
    no label to give: for one trial the derived seed is given in its place. For several there is no way to, and they
    draw other words of the same lengths than in a sweep.
    """
    if len(loads) == 1 and spec.trials == 1:
        return ["--random-seed", str(prompt_seed(spec.seed, loads[0].label, trial=1))]
    return ["--random-seed", str(spec.seed), "--vary-seed-per-trial"]


def prompt_seed(seed: int, label: str, trial: int) -> int:
    """What aiperf makes of the seed for one run of a sweep (``derive_variation_seed``; its trials count from 0)."""
    digest = hashlib.sha256(f"{seed}:variation:{label}:trial:{trial - 1}".encode()).digest()
    return int.from_bytes(digest[:8], "big") & (2**63 - 1)


def _loads(loads: Sequence[Load], staging: Path) -> list[str]:
    warms_up = any(load.warmup_request_count for load in loads)
    if len(loads) == 1:  # aiperf refuses a sweep of one
        (load,) = loads
        argv = ["--concurrency", str(load.concurrency), "--request-count", str(load.request_count)]
        if warms_up:
            argv += ["--warmup-request-count", str(load.warmup_request_count)]
        return [*argv, "--artifact-dir", str(staging / load.label)]
    argv = []
    if warms_up:
        # Without a warm-up phase in the base, aiperf appends each variant's own after the measured phase.
        argv += ["--warmup-request-count", str(max(load.warmup_request_count for load in loads))]
    for load in loads:
        settings = f"concurrency={load.concurrency}, request-count={load.request_count}"
        if warms_up:
            settings += f", warmup-request-count={load.warmup_request_count}"
        argv += ["--variant", f"{load.label}: {settings}"]
    return [*argv, "--artifact-dir", str(staging)]


class Aiperf:
    """One running aiperf call, in a session of its own, writing its console to a log. A context manager.

    Leaving the context ends every process of that session and removes the call's temporary directory (sockets and
    dataset files; aiperf talks to itself over Unix sockets there and listens on no port). Where a server has written
    its key back into an error, it is taken out of all that lies beside the log, where aiperf writes.
    """

    def __init__(
        self,
        argv: Sequence[str],
        log_path: Path,
        on_start: Callable[[int, Path], None] = lambda pid, scratch: None,
        api_key: str | None = None,
    ) -> None:
        """``on_start`` gets the session and the temporary directory, for whoever ends both if we are killed.

        ``api_key`` reaches our endpoint by the environment: a command line is for everybody to see.
        """
        self.argv = tuple(argv)
        self.log_path = log_path
        self._on_start = on_start
        self._api_key = api_key

    def __enter__(self) -> Self:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=_short_directory()))
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(self._scratch, self._api_key),
                start_new_session=True,
            )
        self._on_start(self.pid, self._scratch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._end_session()
        shutil.rmtree(self._scratch, ignore_errors=True)
        if self._api_key is not None:  # aiperf keeps it out of what it writes, but not out of a server's own words
            take_out(self._api_key, self.log_path.parent)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        return self._process.poll()

    def log_tail(self, lines: int = 20) -> str:
        return tail(self.log_path, lines)

    def _end_session(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.pid, number)  # the leader's children outlive it at times, so always the whole group
            except ProcessLookupError:
                break
            deadline = time.monotonic() + GRACE_S
            while time.monotonic() < deadline and _group_lives(self.pid):
                self._process.poll()  # reaps the leader
                time.sleep(0.05)
        self._process.wait()


def _short_directory() -> str:
    """The temporary directory, or /tmp where that is too long: a Unix socket's path has 107 bytes at most.

    aiperf puts its own under ``<ours>/<tempfile's>/aiperf/dataset_manager_proxy_frontend.ipc``.
    """
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= _SOCKET_PATH_BYTES - _BELOW_SCRATCH_BYTES else "/tmp"


def tail(path: Path, lines: int) -> str:
    """The last lines of a log, without empty ones; empty when there is no log."""
    if not path.exists():
        return ""
    kept = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return "\n".join(kept[-lines:])


def complaint(log_path: Path) -> str:
    """What aiperf's log says went wrong, in one line: its last box's reason or first paragraph, else its end."""
    _, found, box = tail(log_path, 200).rpartition("╭")
    if not found:
        return words(tail(log_path, 1)) or "its log is empty"
    rows = [row.strip("│ ") for row in box.splitlines()[1:] if row.startswith("│")]
    paragraph = " ".join(takewhile(bool, dropwhile(lambda row: not row, rows)))
    return words(paragraph.rpartition("Reason: ")[2])


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
        "COLUMNS": "120",
        "NO_COLOR": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
