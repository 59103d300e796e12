"""The aiperf command line of one trial, and the files that the trial leaves.

Each trial is a separate aiperf call, so that a trial can be repeated, resumed and checked alone, and so that the trials
of several cells can be interleaved. All statements about aiperf refer to version 0.13.0.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import dropwhile, takewhile
from pathlib import Path

from trtx.bench.answers import words
from trtx.bench.endpoint import ENDPOINT_TYPE, ENTRY_POINT, ENTRY_POINT_GROUP
from trtx.bench.load import Load, LoadSpec, Target
from trtx.bench.load_field import aiperf_words, plain
from trtx.bench.prompts import MAX_REQUESTS
from trtx.errors import UsageError

PROGRAM = "aiperf"
_SETTINGS = "AIPERF_"  # prefix of aiperf's environment variables
_READY_FILE = ".aiperf_results_ready.json"  # the last file that aiperf writes in a run
# On a machine with few cores, aiperf competes for them with the server that it measures. Two settings reduce its load:
# - one worker process, which handles a few thousand tokens/s;
# - a request rate that such a machine never reaches. With a concurrency alone, aiperf 0.13.0 polls for a finished
#   request in a busy loop while all slots are in use (RequestRateStrategy.execute_phase), which occupies one core for
#   the whole run. With a rate of 1,000/s it polls once per ms, so the next request is sent at most 1 ms late.
# Remove the rate once an aiperf release waits for the end of a request instead of polling.
_FEW_CORES = 4
_ONE_WORKER = ("--workers-max", "1")
# By default, a scenario ends after a fixed duration, and refuses all traces except two published ones. The duration set
# here is longer than any trial, so the request count ends the trial. The flag turns both refusals into a warning in
# aiperf's log.
_OWN_SCENARIO = ("--unsafe-override", "--benchmark-duration", "604800")
_NO_POLLING = ("--request-rate", "1000", "--arrival-pattern", "constant")


@dataclass(frozen=True, slots=True)
class TrialFiles:
    """The directory of one trial, with the file layout that aiperf uses."""

    directory: Path

    @property
    def console(self) -> Path:
        """The file that receives aiperf's terminal output."""
        return self.directory / "aiperf-console.log"

    @property
    def log(self) -> Path:
        return self.directory / "logs" / "aiperf.log"

    @property
    def ended(self) -> bool:
        """Whether aiperf wrote its result. It writes none if all requests failed."""
        return (self.directory / _READY_FILE).exists()


def check_endpoint() -> None:
    """Raises UsageError if aiperf would not find trtx's endpoint plugin. Call this before a server is started."""
    if not entry_points(group=ENTRY_POINT_GROUP, name=ENTRY_POINT):
        raise UsageError(
            f"the installed trtx does not provide aiperf with the endpoint {ENDPOINT_TYPE!r} (entry point "
            f"{ENTRY_POINT!r} of {ENTRY_POINT_GROUP!r}), without which no answer is checked; install trtx again (make "
            "setup, pip install)"
        )


def check_settings() -> None:
    """Raises UsageError if an environment variable sets an aiperf option.

    aiperf would apply it without a message, although it may change the measurement (for example, a new connection per
    request) or stop aiperf before it has a log. No file of the run would record the setting.
    """
    if found := sorted(name for name in os.environ if name.startswith(_SETTINGS)):
        raise UsageError(
            f"{', '.join(found)} {'is' if len(found) == 1 else 'are'} set, so aiperf would apply a setting that no "
            "file of the run records; unset it, and pass settings that have a flag with --aiperf-args"
        )


def command(
    target: Target, spec: LoadSpec, load: Load, trial: int, directory: Path, *, attempt: int = 1
) -> tuple[str, ...]:
    """The command line for trial number ``trial`` (from 1) of ``load`` on one topology. aiperf writes to ``directory``.

    ``attempt``: how many times this trial has been run on the same server, including this time.
    """
    requests = load.warmup_request_count + load.request_count
    # A scenario replays every session of its trace.
    entries = spec.conversation_count(requests, load.concurrency or 1) if spec.scenario is None else MAX_REQUESTS
    argv = [
        PROGRAM, "profile",
        "--model", target.model,
        "--tokenizer", str(target.tokenizer_path),
        "--url", target.url,
        "--endpoint-type", ENDPOINT_TYPE,
        # Prompt lengths as the server counts them: aiperf shortens each prompt by the chat template's tokens, and token
        # counts come from the response's usage, because tokens sampled after the model's own EOS don't survive
        # re-encoding.
        "--apply-chat-template",
        "--use-server-token-count",
        # Each trial has its own prompts. Otherwise the second trial would find those of the first in the prefix cache.
        "--random-seed", str(prompt_seed(spec.seed, load.label, trial, attempt)),
        # One prompt per request, warm-up included. Otherwise later requests would hit the prefix cache.
        "--num-dataset-entries", str(entries),
        "--request-timeout-seconds", str(spec.request_timeout_s),
        "--extra-inputs", json.dumps(spec.request_body(load)),
        "--ui", "none",
        "--no-gpu-telemetry",
        "--no-server-metrics",
        "--request-count", str(load.request_count),
    ]  # fmt: skip
    if load.isl is not None:  # aiperf adds the shared prefix in front of it
        argv += ["--isl", str(load.isl - spec.shared_length)]
    if load.osl is not None:
        argv += ["--osl", str(load.osl)]
    argv += [*aiperf_words(spec), *spec.image_words]
    if spec.prefix_prompt_length:  # aiperf adds no prefix without this number
        argv += ["--num-prefix-prompts", str(spec.num_prefix_prompts)]
    if spec.scenario is not None:
        argv += _OWN_SCENARIO
    elif spec.input_file is not None:  # without either flag, aiperf decides by the first record
        argv += ["--fixed-schedule" if spec.fixed_schedule else "--no-fixed-schedule"]
    if load.warmup_request_count:
        argv += ["--warmup-request-count", str(load.warmup_request_count)]
    if spec.streaming:
        argv += ["--streaming"]
    if load.request_rate is not None:
        argv += ["--request-rate", plain(load.request_rate)]
        if spec.burstiness is None:
            argv += ["--arrival-pattern", spec.arrival or "poisson"]
        else:
            argv += ["--arrival-pattern", "gamma", "--arrival-smoothness", plain(spec.burstiness)]
    elif load.concurrency is not None:
        argv += ["--concurrency", str(load.concurrency)]
    if len(os.sched_getaffinity(0)) <= _FEW_CORES:
        polls = load.concurrency is not None and spec.scenario is None
        argv += (*_ONE_WORKER, *_NO_POLLING) if polls else _ONE_WORKER
    return (*argv, *spec.aiperf_args, "--artifact-dir", str(directory))


def prompt_seed(seed: int, label: str, trial: int, attempt: int = 1) -> int:
    """Seed of one trial's prompts: the same for every topology, different for each load and trial.

    The value equals the one that aiperf derives for one run of a sweep (``derive_variation_seed``, which counts trials
    from 0), so a trial that is measured again gets the same prompts. A second ``attempt`` on the same server gets
    different prompts, because the server's prefix cache holds those of the first.
    """
    which = label if attempt == 1 else f"{label}:attempt:{attempt}"
    digest = hashlib.sha256(f"{seed}:variation:{which}:trial:{trial - 1}".encode()).digest()
    return int.from_bytes(digest[:8], "big") & (2**63 - 1)


def tail(path: Path, lines: int) -> str:
    """The last ``lines`` non-empty lines of a log, or "" if there is no log."""
    if not path.exists():
        return ""
    kept = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return "\n".join(kept[-lines:])


def complaint(log_path: Path) -> str:
    """aiperf's error in one line: the reason or first paragraph of the last box on its console, else the last
    log line.
    """
    _, found, box = tail(log_path, 200).rpartition("╭")
    if not found:
        return words(tail(log_path, 1)) or "its log is empty"
    rows = [row.strip("│ ") for row in box.splitlines()[1:] if row.startswith("│")]
    paragraph = " ".join(takewhile(bool, dropwhile(lambda row: not row, rows)))
    return words(paragraph.rpartition("Reason: ")[2])
