"""The aiperf call that makes one trial of a cell: its command line, and what it leaves.

Each trial is a call of its own, so that it can be made again, resumed and judged alone, and trials of several cells can
take turns. Facts here are of aiperf 0.13.0.
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
from trtx.errors import UsageError

PROGRAM = "aiperf"
_SETTINGS = "AIPERF_"  # what the names of its variables begin with
_READY_FILE = ".aiperf_results_ready.json"  # the last file that aiperf writes for one run
# Where cores are few, aiperf shares them with what it measures, so it is asked to get along with little:
# - one worker process, which carries some thousand tokens/s;
# - a request rate that no such machine reaches. With a concurrency alone, aiperf 0.13.0 asks without a pause whether a
#   request has ended while all are under way (RequestRateStrategy.execute_phase), which keeps a core busy for the whole
#   run. With a rate of 1,000/s it asks every ms, so the next request is sent at most 1 ms late.
# The rate can go with a release of aiperf that waits for a request's end in place of asking.
_FEW_CORES = 4
_ONE_WORKER = ("--workers-max", "1")
_NO_POLLING = ("--request-rate", "1000", "--arrival-pattern", "constant")


@dataclass(frozen=True, slots=True)
class TrialFiles:
    """The directory of one trial, as aiperf fills it."""

    directory: Path

    @property
    def console(self) -> Path:
        """What aiperf writes to its terminal."""
        return self.directory / "aiperf-console.log"

    @property
    def log(self) -> Path:
        return self.directory / "logs" / "aiperf.log"

    @property
    def ended(self) -> bool:
        """aiperf wrote its result. It writes none where all requests failed."""
        return (self.directory / _READY_FILE).exists()


def check_endpoint() -> None:
    """Raises UsageError where aiperf would not find our endpoint, before anything is started for it to measure."""
    if not entry_points(group=ENTRY_POINT_GROUP, name=ENTRY_POINT):
        raise UsageError(
            f"the installed trtx does not offer aiperf its endpoint {ENDPOINT_TYPE!r} (entry point {ENTRY_POINT!r} of "
            f"{ENTRY_POINT_GROUP!r}), without which no answer is checked; install trtx again (make setup, pip install)"
        )


def check_settings() -> None:
    """Raises UsageError where the environment has settings of aiperf: it would take them without a word, such as a new
    connection for each request, or end over one before it has a log, and nothing of a run says so."""
    if found := sorted(name for name in os.environ if name.startswith(_SETTINGS)):
        raise UsageError(
            f"{', '.join(found)} {'is' if len(found) == 1 else 'are'} set, which aiperf would measure by and no run "
            "tells of; unset it, and name what has a flag with --aiperf-args"
        )


def command(
    target: Target, spec: LoadSpec, load: Load, trial: int, directory: Path, *, attempt: int = 1
) -> tuple[str, ...]:
    """The call for one trial, counted from 1, of ``load`` on one topology; its files go to ``directory``.

    ``attempt``: how often it was made on this server, this time included.
    """
    argv = [
        PROGRAM, "profile",
        "--model", target.model,
        "--tokenizer", str(target.tokenizer_path),
        "--url", target.url,
        "--endpoint-type", ENDPOINT_TYPE,
        # Lengths as the server sees them: prompts are made shorter by the chat template's own tokens, and counts come
        # from the answers' usage, because tokens sampled past a model's own ending do not survive being re-encoded.
        "--apply-chat-template",
        "--use-server-token-count",
        # Each trial draws its own prompts, or the second would find all of the first's in the prefix cache.
        "--random-seed", str(prompt_seed(spec.seed, load.label, trial, attempt)),
        # One prompt a request, warm-up included, or later ones would be found in the prefix cache.
        "--num-dataset-entries", str(
            spec.conversation_count(load.warmup_request_count + load.request_count, load.concurrency or 1)
        ),
        "--request-timeout-seconds", str(spec.request_timeout_s),
        "--extra-inputs", json.dumps(spec.request_body(load)),
        "--ui", "none",
        "--no-gpu-telemetry",
        "--no-server-metrics",
        "--request-count", str(load.request_count),
    ]  # fmt: skip
    if load.isl is not None:  # aiperf puts what is shared before it
        argv += ["--isl", str(load.isl - spec.shared_length)]
    if load.osl is not None:
        argv += ["--osl", str(load.osl)]
    argv += [*aiperf_words(spec), *spec.image_words]
    if spec.prefix_prompt_length:  # aiperf has no prefix without their number
        argv += ["--num-prefix-prompts", str(spec.num_prefix_prompts)]
    if spec.input_file is not None:  # without either, what the first record has decides
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
        argv += _ONE_WORKER if load.concurrency is None else (*_ONE_WORKER, *_NO_POLLING)
    return (*argv, *spec.aiperf_args, "--artifact-dir", str(directory))


def prompt_seed(seed: int, label: str, trial: int, attempt: int = 1) -> int:
    """Of one trial's prompts: the same in every topology, and others in each load and trial.

    It is what aiperf itself makes of the seed for one run of a sweep (``derive_variation_seed``, whose trials count
    from 0), so a trial that is measured anew gets the prompts that it would have had. A second ``attempt`` on the same
    server gets others: it holds the first one's in its prefix cache.
    """
    which = label if attempt == 1 else f"{label}:attempt:{attempt}"
    digest = hashlib.sha256(f"{seed}:variation:{which}:trial:{trial - 1}".encode()).digest()
    return int.from_bytes(digest[:8], "big") & (2**63 - 1)


def tail(path: Path, lines: int) -> str:
    """The last lines of a log, without empty ones; empty when there is no log."""
    if not path.exists():
        return ""
    kept = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return "\n".join(kept[-lines:])


def complaint(log_path: Path) -> str:
    """What aiperf's console says went wrong, in one line: its last box's reason or first paragraph, else its end."""
    _, found, box = tail(log_path, 200).rpartition("╭")
    if not found:
        return words(tail(log_path, 1)) or "its log is empty"
    rows = [row.strip("│ ") for row in box.splitlines()[1:] if row.startswith("│")]
    paragraph = " ".join(takewhile(bool, dropwhile(lambda row: not row, rows)))
    return words(paragraph.rpartition("Reason: ")[2])
