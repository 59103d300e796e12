"""Cells with a planted cause of slowness, and cells without one, as the rows and records that such a run leaves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from trtx.bench.explain import CellExplanation, explain
from trtx.bench.readings import GpuReading
from trtx.bench.records import RequestRecord
from trtx.bench.stage_rows import StageRow, WorkerUse
from trtx.bench.stages import split_requests

START_NS = 1_800_000_000_000_000_000
TOKENS = 17
LEAST_REQUESTS = 40


@dataclass(frozen=True)
class Times:
    """The stages of one request in seconds."""

    gate: float = 0.0005
    frontend: float = 0.003
    queue: float = 0.001
    prefill: float = 0.030
    hop: float = 0.004  # from prefill's token until decode passes it on; 0: one worker serves it whole
    read: float = 0.002
    first_step: float = 0.008
    decode: float = 0.120
    device_wait: float | None = None
    stream: float = 0.002
    late_stream: float = 0.0  # between the first and the last token
    prompt_tokens: int = 256


def request(
    number: int, times: Times, *, at_s: float | None = None, mode: str = "agg"
) -> tuple[RequestRecord, list[StageRow]]:
    """One request and the rows of its workers. ``at_s``: when it was sent; None: every 50 ms."""
    start_ns = START_NS + round(1e9 * (0.05 * number if at_s is None else at_s))
    one, name = times, f"00000000-0000-4000-8000-{number:012d}"
    is_whole = mode == "agg"
    arrived_s, submitted_s = one.frontend / 2, one.frontend / 2
    token_s = submitted_s + one.queue + one.prefill
    ttft = one.frontend + one.queue + one.prefill + one.stream + (0.0 if is_whole else one.hop)
    span = one.decode + (0.0 if is_whole else one.read + one.first_step)
    common = {"id": name, "prompt_tokens": one.prompt_tokens, "cached_tokens": 0}
    of_prompt = StageRow(
        **common, worker="agg-0" if is_whole else "prefill-0", role="agg" if is_whole else "prefill", outcome="length",
        arrived_ns=start_ns + round(1e9 * arrived_s), submitted_s=submitted_s, queue_s=one.queue, prefill_s=one.prefill,
        token_s=token_s, first_chunk_s=token_s + 0.0002, last_chunk_s=token_s + 0.0002,
    )  # fmt: skip
    if is_whole:
        rows = [
            replace(
                of_prompt, tokens=TOKENS, decode_s=one.decode, device_wait_s=one.device_wait,
                last_chunk_s=token_s + 0.0002 + span,
            )
        ]  # fmt: skip
    else:
        decode = StageRow(
            **common, worker="decode-0", role="decode", outcome="length", tokens=TOKENS,
            arrived_ns=of_prompt.arrived_ns + round(1e9 * (token_s + one.hop - 0.001)), submitted_s=0.0005,
            first_chunk_s=0.001, last_chunk_s=0.001 + span, read_s=one.read, first_step_s=one.first_step,
            decode_s=one.decode, device_wait_s=one.device_wait,
        )  # fmt: skip
        rows = [of_prompt, decode]
    latency = ttft + span + one.late_stream
    record = RequestRecord(
        start_ns=start_ns, end_ns=start_ns + round(1e9 * latency), error=None, time_to_first_token=1e3 * ttft,
        inter_token_latency=1e3 * (latency - ttft) / (TOKENS - 1), request_latency=1e3 * latency,
        input_sequence_length=one.prompt_tokens, output_sequence_length=TOKENS,
        credit_issued_ns=start_ns - round(1e9 * one.gate), request_id=name,
    )  # fmt: skip
    return record, rows


@dataclass
class SlowCell:
    """A cell to be explained."""

    mode: str = "agg"
    records: list[RequestRecord] = field(default_factory=list)
    rows: list[StageRow] = field(default_factory=list)
    gpus: tuple[GpuReading, ...] | None = ()
    uses: list[WorkerUse] = field(default_factory=list)

    def add(self, times: Times, *, at_s: float | None = None) -> None:
        record, rows = request(len(self.records), times, at_s=at_s, mode=self.mode)
        self.records.append(record)
        self.rows += rows

    def use(self, worker: str, cores: int, share: float, seconds: int = 5) -> None:
        """CPU time of a worker, once a second."""
        self.uses += [
            WorkerUse(worker=worker, at_ns=START_NS + second * 10**9, cores=cores, cpu_s=share * second)
            for second in range(seconds)
        ]

    def explained(self) -> CellExplanation:
        splits = split_requests(self.records, self.rows)
        return explain("cell", len(self.records), splits, self.gpus, self.uses)


def evenly(times: Times, *, mode: str = "agg", count: int = LEAST_REQUESTS) -> SlowCell:
    """A cell whose requests all take the same time."""
    cell = SlowCell(mode)
    for _ in range(count):
        cell.add(times)
    return cell


def planted(seed: int) -> Iterator[tuple[str, SlowCell]]:
    """One cell for each cause, by the cause's name."""
    draw = random.Random(seed)
    some = draw.uniform(1.0, 2.0)
    yield "slow client", evenly(Times(gate=0.050 * some))
    yield "queue", evenly(Times(queue=0.120 * some))
    yield "slow handoff", evenly(Times(read=0.300 * some), mode="disagg")
    yield "host-bound engine", evenly(Times(device_wait=0.010 * some))
    throttled = evenly(Times(device_wait=0.110))
    reading = GpuReading("GPU 0", 900, 1980, ("thermal, by hardware",), 300.0, 90)
    throttled.gpus = (reading,) * draw.randint(3, 9)
    yield "throttled GPU", throttled
    one_core = evenly(Times())
    one_core.use("agg-0", cores=1, share=0.90 + 0.05 * (some - 1))
    yield "worker on one core", one_core
    behind = SlowCell()
    for number in range(8):
        at_s = 2.0 * number
        behind.add(Times(prompt_tokens=8192, prefill=0.8 * some), at_s=at_s)
        for after in range(4):
            behind.add(Times(prompt_tokens=64, queue=0.8 * some - 0.02 * after, prefill=0.02), at_s=at_s + 0.02 * after)
        for after in range(12):  # requests that come when no long prompt is there
            behind.add(Times(prompt_tokens=64, prefill=0.02), at_s=at_s + 1.7 + 0.02 * after)
    yield "head of line", behind


def sound(seed: int) -> SlowCell:
    """A cell in which nothing stands out."""
    draw = random.Random(seed)
    mode = draw.choice(("agg", "disagg"))
    cell = SlowCell(mode)
    wait = draw.choice((None, 0.9))
    for _ in range(draw.randint(LEAST_REQUESTS, 200)):
        decode = draw.uniform(0.1, 0.3)
        cell.add(
            Times(
                gate=draw.uniform(0, 0.003), frontend=draw.uniform(0.002, 0.01), queue=draw.uniform(0, 0.012),
                prefill=draw.uniform(0.02, 0.06), hop=draw.uniform(0.002, 0.012), read=draw.uniform(0, 0.004),
                first_step=draw.uniform(0.005, 0.015), decode=decode, stream=draw.uniform(0.001, 0.006),
                device_wait=None if wait is None else wait * decode, late_stream=draw.uniform(0, 0.01),
                prompt_tokens=draw.randint(128, 400),
            )
        )  # fmt: skip
    cell.gpus = draw.choice(((), None, (GpuReading("GPU 0", 1900, 1980, ("power limit",)),) * 5))
    cell.use("agg-0", cores=draw.choice((2, 8)), share=draw.uniform(0.5, 1.9))
    cell.use("decode-0", cores=1, share=draw.uniform(0.1, 0.6))
    return cell
