"""Measures the outage of a topology with one worker per role after ``kill -9`` of a worker.

A probe requests two tokens every 50 ms, each time on a new connection. The outage is the time from the kill to the
start of the first successful request after the last failed one. The table also shows the number of failed requests, and
when the launcher reported the topology as ready again. One second of the outage is the launcher's back-off. With Dynamo
1.4.2 alone, where discovery records of a dead worker are not deleted, the model returns errors for 8 to 12 s, and the
worker stays down until it is restarted manually.

    python benchmarks/outage.py [--engine paced|torch] [--rounds 3]
"""

from __future__ import annotations

import argparse
import http.client
import os
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trtx.bench import answers
from trtx.config import TopologySpec
from trtx.launch import Event, ServedTopology, prepare, serve
from trtx.launch.readiness import request

_PROBE_EVERY_S = 0.05
_GIVE_UP_S = 60.0


@dataclass(frozen=True, slots=True)
class Outage:
    seconds: float
    failed: int
    whole_seconds: float


class Probe:
    """Sends requests at a constant rate, and records the start and the error of each."""

    def __init__(self, topology: ServedTopology) -> None:
        self.answers: list[tuple[float, str | None]] = []
        self._topology = topology
        self._pool = ThreadPoolExecutor(256)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._pool.shutdown()

    def _run(self) -> None:
        while not self._stop.wait(_PROBE_EVERY_S):
            self._pool.submit(self._ask)

    def _ask(self) -> None:
        began = time.monotonic()
        self.answers.append((began, ask(self._topology.url, self._topology.model)))


def ask(url: str, model: str) -> str | None:
    """Requests two tokens. Returns None if the answer is complete by trtx bench's rule, else the problem."""
    body = {"model": model, "prompt": "Are you there?", "max_tokens": 2, "min_tokens": 2, "ignore_eos": True}
    try:
        code, said = request(url, "POST", "/v1/completions", body, timeout_s=30)
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    text = said.decode(errors="replace")
    if code != 200:
        return f"HTTP {code} {answers.words(text)}"
    answer = answers.Answer()
    answer.add_text(text)
    return answer.fault(answers.Asked.of(body)) or (None if answer.is_counted else "no usage in the answer")


def measure(topology: ServedTopology, victim: str, events: list[Event]) -> Outage:
    probe = Probe(topology)
    topology.wait(2.0)
    (slot,) = (slot for slot in topology.slots if slot.spec.name == victim)
    assert slot.child is not None
    recovered = sum(event.kind == "recovered" for event in events)
    killed = time.monotonic()
    os.kill(slot.child.pid, signal.SIGKILL)
    while sum(event.kind == "recovered" for event in events) == recovered:
        topology.wait(0.02)
        if time.monotonic() - killed > _GIVE_UP_S:
            raise TimeoutError(f"{victim} is not back after {_GIVE_UP_S:.0f} s")
    whole = time.monotonic() - killed
    back = time.monotonic()
    while not any(problem is None and began > back for began, problem in list(probe.answers)):
        topology.wait(0.05)
        if time.monotonic() - killed > _GIVE_UP_S:
            raise TimeoutError(f"no request has succeeded {_GIVE_UP_S:.0f} s after {victim} was killed")
    probe.stop()
    bad = [began for began, problem in probe.answers if problem is not None and began >= killed - 0.5]
    good = sorted(began for began, problem in probe.answers if problem is None)
    if not bad:
        return Outage(0.0, 0, whole)
    first_good = next(began for began in good if began > max(bad))
    return Outage(first_good - killed, len(bad), whole)


def main() -> None:
    parser = argparse.ArgumentParser(description="Outage after kill -9 of the only worker of a role.")
    parser.add_argument("--engine", default="paced")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    overrides = ("paced_ttft_ms=5", "paced_itl_ms=5") if arguments.engine == "paced" else ()
    print(f"{'engine':<8} {'killed':<11} {'outage s':>9} {'failed':>7} {'whole again s':>14}")
    for victim in ("decode-0", "prefill-0", "frontend"):
        for _ in range(arguments.rounds):
            events: list[Event] = []
            with tempfile.TemporaryDirectory(prefix="trtx-outage-") as directory:
                spec = TopologySpec(mode="disagg", engine=arguments.engine, port=0, overrides=overrides)
                plan = prepare(spec, run_dir=Path(directory))
                with serve(plan, on_event=events.append) as topology:
                    seen = measure(topology, victim, events)
            print(
                f"{arguments.engine:<8} {victim:<11} {seen.seconds:>9.2f} {seen.failed:>7} {seen.whole_seconds:>14.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
