"""What a fault costs, measured: requests at a steady pace beside long streams, and how both ended."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from topology_clients import Load, Stream, stream_once

_PROBE_TOKENS = 2
_STREAMS = 6


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one fault. A request is lost, and a stream cut, whose client got anything but a whole answer."""

    requests: int  # at the steady pace, until some seconds after all was whole again; and streams that had not begun
    lost: int
    streams: int  # long ones, which had begun: what is refused at once is asked again, and not counted
    streams_cut: int
    outage_s: float  # from the fault to the first request that succeeds after the last one that was lost; 0: none was
    slowest_s: float  # the longest that a request took which was not lost
    whole_s: float  # from the fault until all was whole again
    problems: tuple[str, ...]  # what the lost ones were told, each once


@dataclass
class Probe:
    """A request of two tokens every ``every_s``, each on a connection of its own."""

    url: str
    model: str
    every_s: float = 0.1
    answers: list[Stream] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Probe:
        self._pool = ThreadPoolExecutor(256)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._pool.shutdown()

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(self.every_s):
            number += 1
            self._pool.submit(self._ask, f"probe {number}")

    def _ask(self, prompt: str) -> None:
        self.answers.append(stream_once(self.url, self.model, prompt, _PROBE_TOKENS))


@dataclass
class Measured:
    """Filled when the block of :func:`measuring` has ended."""

    url: str
    model: str
    costs: list[Cost] = field(default_factory=list)

    @property
    def cost(self) -> Cost:
        return self.costs[-1]


@contextmanager
def measuring(
    url: str, model: str, is_whole: Callable[[], bool], *, stream_tokens: int, whole_s: float, after_s: float = 3.0
) -> Iterator[Measured]:
    """Load around a fault that the block makes, with what ends it: a link that is mended, a server that comes again.

    ``is_whole`` is asked from the end of the block on, at most ``whole_s`` long; the load goes on for ``after_s`` more.
    AssertionError where it is not whole by then, or where nothing answers before the fault.
    """
    measured = Measured(url, model)
    # Of two lengths, or all would begin and end together, and a fault might meet none in the middle.
    with (
        Probe(url, model) as probe,
        Load(url, model, _STREAMS // 2, stream_tokens) as longer,
        Load(url, model, _STREAMS // 2, stream_tokens * 2 // 3) as shorter,
    ):
        _wait(lambda: len(probe.answers) >= 10 and len(longer.streams) >= _STREAMS, 30, "answers before the fault")
        before = [*probe.answers, *longer.streams, *shorter.streams]
        assert all(one.is_good for one in before), "lost before any fault"
        fault = time.monotonic()
        yield measured
        _wait(is_whole, whole_s, f"whole again; {_summary(probe.answers, fault)}")
        whole = time.monotonic() - fault
        _wait(lambda: any(one.is_good and one.began > fault + whole for one in list(probe.answers)), 30, "an answer")
        _wait(lambda: time.monotonic() > fault + whole + after_s, after_s + 5, "the time after it")
    measured.costs.append(_cost(fault, whole, probe.answers, [*longer.streams, *shorter.streams]))


def _cost(fault: float, whole: float, probes: list[Stream], streams: list[Stream]) -> Cost:
    begun = [one for one in streams if one.ended > fault and one.chunks]
    # One that was on its way when the fault came, and of which nothing had come back, is a request as any other.
    probes = [one for one in probes if one.ended > fault]
    probes += [one for one in streams if one.began < fault < one.ended and not one.chunks]
    everything = [*probes, *begun]
    lost = [one for one in everything if not one.is_good]
    good = sorted(one.began for one in everything if one.is_good)
    outage = 0.0
    if lost:
        last = max(one.began for one in lost)
        outage = max(0.0, next((began for began in good if began > last), last) - fault)
    return Cost(
        requests=len(probes),
        lost=sum(not one.is_good for one in probes),
        streams=len(begun),
        streams_cut=sum(not one.is_good for one in begun),
        outage_s=outage,
        slowest_s=max((one.ended - one.began for one in probes if one.is_good), default=0.0),
        whole_s=whole,
        problems=tuple(sorted({(one.problem or "cut off: no finish_reason")[:120] for one in lost})),
    )


def _summary(answers: list[Stream], fault: float) -> str:
    after = [one for one in answers if one.began > fault]
    return f"{len(after)} probes since, of which lost {sum(not one.is_good for one in after)}"


def _wait(holds: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)


def row(fault: str, costs: list[Cost]) -> str:
    """One row of the table of docs/hosts-faults.md: sums of requests, medians and the worst of seconds."""

    def seconds(values: list[float]) -> str:
        return f"{statistics.median(values):.1f} ({max(values):.1f})"

    cells = [
        fault,
        str(len(costs)),
        f"{sum(cost.lost for cost in costs)} of {sum(cost.requests for cost in costs):,}",
        f"{sum(cost.streams_cut for cost in costs)} of {sum(cost.streams for cost in costs)}",
        seconds([cost.outage_s for cost in costs]),
        seconds([cost.slowest_s for cost in costs]),
        seconds([cost.whole_s for cost in costs]),
    ]
    return f"| {' | '.join(cells)} |"
