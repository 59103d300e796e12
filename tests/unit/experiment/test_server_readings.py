"""What a run reads of what it measures: real files, real HTTP and processes, an NVML that answers as a script says."""

from __future__ import annotations

import http.server
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback import Handler, running

from tests.unit.doctor.scripted_nvml import GIB, H100S, refuses, script_two_gpus
from trtx.bench import ForeignProcess, Target, draft_counters, handoffs
from trtx.bench.draft_counters import DraftCounts
from trtx.bench.handoffs import NO_PREFILL, HandoffCounts
from trtx.bench.image_counters import grown, over_trials
from trtx.doctor import GpuProcess
from trtx.engine.worker_facts import PATH, PublishedWorker, WorkerFacts, to_body
from trtx.experiment import server_readings
from trtx.experiment.cpu_readings import CpuReader
from trtx.experiment.server_readings import cores_beside, foreign_of, open_attached, open_topology, sees_host_pids
from trtx.topology import Plan, ProcessSpec

METRICS = """# HELP trtx_requests_total Requests that ended, by outcome.
trtx_requests_total{{dynamo_component="backend",outcome="stop"}} {stop}
trtx_requests_total{{dynamo_component="backend",outcome="length"}} 30.0
trtx_requests_created{{outcome="length"}} 1.7e+09
trtx_prompt_tokens_total 4096.0
"""


class Served:
    """An HTTP server of one process of a topology, with what it answers by path."""

    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.answers: dict[str, bytes] = {}
        answers = self.answers

        class Metrics(Handler):
            def do_GET(self) -> None:
                body = answers.get(self.path)
                self.answer(404 if body is None else 200, body or b"")

        server = http.server.ThreadingHTTPServer(address, Metrics)
        self.port = server.server_port
        self._stack = ExitStack()
        self._stack.enter_context(running(server))

    def end(self) -> None:
        self._stack.close()


@pytest.fixture
def servers() -> Iterator[tuple[Served, Served]]:
    pair = Served(), Served()
    for served, stop in zip(pair, (12, 0), strict=True):
        served.answers["/metrics"] = METRICS.format(stop=stop).encode()
    yield pair
    for served in pair:
        served.end()


def _worker(name: str, role: Any, port: int | None, gpu: int | None) -> ProcessSpec:
    env = {"CUDA_VISIBLE_DEVICES": "" if gpu is None else H100S[gpu]}
    return ProcessSpec(name, role, (), env, Path(), () if gpu is None else (gpu,), system_port=port)


def _plan(*workers: ProcessSpec, router: str = "round-robin") -> Plan:
    frontend = ProcessSpec("frontend", "frontend", ("python", "--router-mode", router), {}, Path())
    return Plan(
        mode="disagg", engine="torch", model="m", model_path=Path(), namespace="trtx-a", host="127.0.0.1", port=1,
        internal_ports=(), run_dir=Path(), scratch_dir=Path(), processes=(frontend, *workers), engine_configs={},
        gpu_names=("H100",) * sum(len(worker.gpu_indices) for worker in workers), reasons=(),
    )  # fmt: skip


def _both(servers: tuple[Served, Served]) -> Plan:
    return _plan(_worker("prefill-0", "prefill", servers[0].port, 0), _worker("decode-0", "decode", servers[1].port, 1))


@pytest.fixture
def engine() -> Iterator[psutil.Process]:
    """A process of the topology."""
    argv = [sys.executable, "-c", "import sys; print(); sys.stdout.flush(); sys.stdin.read()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, env={**os.environ, "TRTX_TOPOLOGY": "trtx-a"}) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it runs
        yield psutil.Process(process.pid)
        process.communicate()


def test_gpus_and_workers_of_a_topology_are_read_while_it_serves(
    servers: tuple[Served, Served], engine: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_two_gpus(monkeypatch)
    entries = {H100S[0]: (engine.pid,), H100S[1]: (engine.pid, os.getpid())}
    monkeypatch.setattr(
        pynvml,
        "nvmlDeviceGetComputeRunningProcesses",
        lambda handle: [SimpleNamespace(pid=pid, usedGpuMemory=GIB) for pid in entries[handle]],
    )
    monkeypatch.setattr(server_readings, "sees_host_pids", lambda: True)
    millijoules = {H100S[0]: itertools.count(5_000_000, 650_000), H100S[1]: itertools.count(0)}
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", lambda handle: next(millijoules[handle]))
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetUtilizationRates", lambda handle: SimpleNamespace(gpu=97 if handle == H100S[0] else 0)
    )
    with open_topology(_both(servers)) as read:
        first = read()
        servers[1].answers["/metrics"] = METRICS.format(stop=5).encode()
        second = read()
    assert first.ended_requests == {"prefill": {"prefill-0": 42}, "decode": {"decode-0": 30}}
    assert second.ended_requests == {"prefill": {"prefill-0": 42}, "decode": {"decode-0": 35}}
    assert first.at_ns < second.at_ns
    assert first.gpus is not None
    hot, cool = first.gpus
    assert (hot.name, hot.sm_clock_mhz, hot.max_sm_clock_mhz, hot.temperature_c) == ("GPU 0", 1200, 1980, 88)
    assert (hot.clock_reasons, hot.power_w, hot.memory_used_bytes) == (
        ("power limit", "thermal, by software"), 345.5, GIB,
    )  # fmt: skip
    assert (hot.foreign, cool.name) == ((), "GPU 1")
    assert (hot.energy_j, hot.utilization_percent, cool.utilization_percent) == (5000.0, 97.0, 0.0)
    assert second.gpus is not None and second.gpus[0].energy_j == 5650.0
    assert hot.energy_at_ns is not None and first.at_ns <= hot.energy_at_ns < second.at_ns
    assert cool.foreign is not None
    assert [one.pid for one in cool.foreign] == [os.getpid()]


def test_a_topology_on_the_cpu_has_no_gpu_to_read(servers: tuple[Served, Served], monkeypatch: Any) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", refuses)
    with open_topology(_plan(_worker("agg-0", "agg", servers[0].port, None))) as read:
        assert read().gpus == ()


def test_gpus_without_an_nvml_are_not_known(servers: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", refuses)
    with open_topology(_both(servers)) as read:
        assert read().gpus is None


@pytest.mark.parametrize("body", [b"", b"trtx_prompt_tokens_total 7\n", None])
def test_a_worker_that_does_not_count_leaves_all_counts_unknown(
    servers: tuple[Served, Served], body: bytes | None
) -> None:
    if body is None:
        del servers[1].answers["/metrics"]
    else:
        servers[1].answers["/metrics"] = body
    with open_topology(_both(servers)) as read:
        assert read().ended_requests is None
    silent = _plan(_worker("agg-0", "agg", servers[0].port, None), _worker("agg-1", "agg", None, None))
    with open_topology(silent) as read:
        assert read().ended_requests is None


FACTS = WorkerFacts("agg-0", "agg", "torch", {}, (), 1, 4096, None, None, None, None)


def _target(served: Served, **changes: Any) -> Target:
    return replace(Target(f"http://127.0.0.1:{served.port}", "m", Path(), "attached", worker_count=1), **changes)


def _reads_no_worker(target: Target) -> bool:
    with open_attached(target) as read:
        assert read is not None, "the cores of this machine can be read"
        reading = read()
    return reading.ended_requests is reading.pictures is reading.handoffs is None


def _publish(served: Served, *facts: WorkerFacts, addresses: tuple[str, ...] = ()) -> None:
    """Workers 0xa0, 0xa1 and so on of trtx-a, as Dynamo's frontend and ours tell of them."""
    body = to_body([PublishedWorker(0xA0 + place, "m", one) for place, one in enumerate(facts)])
    served.answers[PATH] = msgspec.json.encode(body)
    instances = [
        {
            "component": "backend", "endpoint": "generate", "namespace": "trtx-a", "instance_id": 0xA0 + place,
            "transport": {"tcp": f"{address}:4711/{0xA0 + place:x}/generate"},
        }
        for place, address in enumerate(addresses or ["127.0.0.1"] * len(facts))
    ]  # fmt: skip
    served.answers["/health"] = msgspec.json.encode({"status": "healthy", "instances": instances})


def _counts(worker_id: str, stop: int, namespace: str = "trtx-a") -> bytes:
    labels = f'dynamo_namespace="{namespace}",model="m",worker_id="{worker_id}"'
    return "".join(
        f'trtx_requests_total{{outcome="{outcome}",{labels}}} {count}.0\n'
        for outcome, count in (("stop", stop), ("length", 0))
    ).encode()


def test_workers_of_an_attached_deployment_are_read_where_they_say_how(servers: tuple[Served, Served]) -> None:
    frontend, worker = servers
    _publish(frontend, replace(FACTS, metrics_port=worker.port))
    worker.answers["/metrics"] = _counts("a0", 30)
    with open_attached(_target(frontend)) as read:
        assert read is not None
        reading = read()
    assert (reading.gpus, reading.ended_requests) == (None, {"agg": {"agg-0": 30}})


@pytest.mark.parametrize(
    "body",
    [
        _counts("dead", 30),
        _counts("a0", 30, namespace="trtx-b"),
        _counts("a0", 30) + _counts("dead", 30),  # as of who gathers the metrics of several
        METRICS.format(stop=30).encode(),
    ],
)
def test_whoever_else_answers_at_a_published_port_counts_for_nobody(
    servers: tuple[Served, Served], body: bytes
) -> None:
    frontend, stranger = servers
    _publish(frontend, replace(FACTS, name="decode-0", role="decode", metrics_port=stranger.port))
    stranger.answers["/metrics"] = body + b"trtx_whole_requests_total 0.0\n"
    with open_attached(_target(frontend)) as read:
        assert read is not None
        reading = read()
    assert (reading.ended_requests, reading.handoffs) == (None, None)


def test_a_worker_is_not_counted_as_another_that_publishes_the_same_port_or_name(
    servers: tuple[Served, Served],
) -> None:
    frontend, worker = servers
    told = replace(FACTS, metrics_port=worker.port)
    worker.answers["/metrics"] = _counts("a0", 30)
    _publish(frontend, told, replace(told, name="agg-1"))
    with open_attached(_target(frontend, worker_count=2)) as read:
        assert read is not None
        assert read().ended_requests is None
    _publish(frontend, told, told)
    assert _reads_no_worker(_target(frontend, worker_count=2))


def test_a_worker_that_was_started_again_is_another(servers: tuple[Served, Served]) -> None:
    frontend, worker = servers
    _publish(frontend, replace(FACTS, metrics_port=worker.port))
    worker.answers["/metrics"] = _counts("a0", 30)
    with open_attached(_target(frontend)) as read:
        assert read is not None
        assert read().ended_requests == {"agg": {"agg-0": 30}}
        worker.answers["/metrics"] = _counts("b0", 40)
        assert read().ended_requests is None, "its 40 are not 10 more"


def test_workers_of_other_hosts_are_read_there_and_their_handoffs_too(servers: tuple[Served, Served]) -> None:
    frontend, stranger = servers
    stranger.answers["/metrics"] = _counts("dead", 99)
    decode = Served(("127.0.0.2", stranger.port))  # another host that plans the same port
    try:
        labels = 'dynamo_namespace="trtx-a",worker_id="a0"'
        pair = f'trtx_pair_handoffs_total{{outcome="recomputed",prefill="prefill-0",{labels}}} 4.0\n'
        whole = f"trtx_whole_requests_total{{{labels}}} 0.0\n"
        decode.answers["/metrics"] = _counts("a0", 4) + (pair + whole).encode()
        facts = replace(FACTS, name="decode-0", role="decode", metrics_port=decode.port)
        _publish(frontend, facts, addresses=("127.0.0.2",))
        with open_attached(_target(frontend)) as read:
            assert read is not None
            reading = read()
    finally:
        decode.end()
    assert reading.ended_requests == {"decode": {"decode-0": 4}}
    assert reading.handoffs == {
        "decode-0": {NO_PREFILL: HandoffCounts(whole=0), "prefill-0": HandoffCounts(recomputed=4)}
    }


def test_workers_that_do_not_say_how_or_are_elsewhere_are_not_read(servers: tuple[Served, Served]) -> None:
    frontend, worker = servers
    worker.answers["/metrics"] = _counts("a0", 30)
    told = replace(FACTS, metrics_port=worker.port)
    for facts, changes in (
        ((FACTS,), {}),
        ((told, replace(FACTS, name="agg-1")), {"worker_count": 2}),
        ((told,), {"worker_count": 2}),
        ((told,), {"model": "another"}),
        ((told,), {"url": f"http://0.0.0.0:{frontend.port}"}),  # to know of: not this machine's loopback
    ):
        _publish(frontend, *facts)
        assert _reads_no_worker(_target(frontend, **changes))
    for health in (b"", b"[]", b'{"instances": [{"endpoint": "generate"}]}', b'{"instances": []}', None):
        _publish(frontend, told)
        if health is None:
            del frontend.answers["/health"]
        else:
            frontend.answers["/health"] = health
        assert _reads_no_worker(_target(frontend)), "nobody knows where it is"
    assert _reads_no_worker(_target(worker))  # it publishes nothing


def test_where_neither_workers_nor_cores_can_be_read_there_is_nothing_to_read(
    servers: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuReader, "read", lambda self: None)
    with open_attached(_target(servers[0])) as read:
        assert read is None


def test_the_cores_are_the_topologys_that_is_served(servers: tuple[Served, Served]) -> None:
    with open_topology(_plan(_worker("agg-0", "agg", servers[0].port, None))) as read:
        cpu = read().cpu
    assert cpu is not None
    assert (cpu.scope, cpu.cores) == ("run", len(os.sched_getaffinity(0)))
    assert 0 < cpu.run_s <= cpu.processes_s <= cpu.total_s


def _scope(target: Target) -> str | None:
    with open_attached(target) as read:
        assert read is not None
        cpu = read().cpu
    return None if cpu is None else cpu.scope


def test_beside_a_deployment_on_this_machine_its_own_processes_must_be_known(
    servers: tuple[Served, Served],
) -> None:
    frontend, worker = servers
    worker.answers["/metrics"] = _counts("a0", 30)
    assert _scope(_target(frontend)) == "unknown", "which processes are its own, nobody tells"
    _publish(frontend, replace(FACTS, metrics_port=worker.port))
    assert _scope(_target(frontend)) == "unknown", "none of trtx-a is here, as behind a forwarded port"
    ours = {**os.environ, "TRTX_TOPOLOGY": "trtx-a"}
    with subprocess.Popen(["sleep", "600"], env=ours) as process:
        try:
            _until(lambda: _scope(_target(frontend)) == "run")
        finally:
            process.kill()


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_of_a_deployment_on_another_machine_only_the_clients_is_read(servers: tuple[Served, Served]) -> None:
    # 192.0.2.0/24 is nobody's (RFC 5737). That it answers is not needed to know that it is not here.
    assert cores_beside(_target(servers[0], url="http://192.0.2.7:8000"), ()).scope == "client"
    assert cores_beside(_target(servers[0], url="http://no-such-name.invalid:8000"), ()).scope == "client"
    for here in ("127.0.0.1", "localhost", "0.0.0.0"):
        assert cores_beside(_target(servers[0], url=f"http://{here}:8000"), ()).scope == "unknown"


def test_a_kv_router_goes_by_prefixes() -> None:
    assert _plan(router="kv").routes_by_prefix
    assert not _plan().routes_by_prefix


OURS = GpuProcess(7, "python", GIB, "trtx-a")
PROCESSES = st.lists(
    st.builds(
        GpuProcess,
        st.integers(1, 99),
        st.none() | st.just("python"),
        st.none(),
        st.sampled_from([None, "trtx-a", "trtx-b"]),
        st.none() | st.floats(0, 100),
    ),
    max_size=4,
)


@given(PROCESSES, st.booleans())
def test_foreign_processes_are_told_only_where_the_list_is_of_this_machine(
    processes: list[GpuProcess], sees_all: bool
) -> None:
    found = foreign_of(processes, "trtx-a", sees_all)
    others = [one for one in processes if one.topology != "trtx-a"]
    if found is None:
        assert len(others) == len(processes) or not sees_all
    else:
        assert [one.pid for one in found] == [one.pid for one in others]
        assert found or sees_all


def test_an_empty_rest_is_none_only_where_all_processes_are_seen() -> None:
    other = GpuProcess(8, "train.py", GIB, None, 40.0)
    assert foreign_of([OURS], "trtx-a", sees_all=True) == ()
    assert foreign_of([OURS], "trtx-a", sees_all=False) is None
    assert foreign_of([OURS, other], "trtx-a", sees_all=False) == (ForeignProcess(8, "train.py", 40.0),)
    assert foreign_of([OURS, replace(other, name=None)], "trtx-a", sees_all=False) is None  # the host's pids
    assert foreign_of([other], "trtx-a", sees_all=True) is None  # where is ours?
    assert foreign_of([], "trtx-a", sees_all=True) is None


def test_pids_are_the_machines_own_in_the_first_namespace_alone(tmp_path: Path) -> None:
    assert not sees_host_pids(tmp_path)
    (tmp_path / "proc" / "self" / "ns").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "ns" / "pid").touch()
    assert not sees_host_pids(tmp_path)


PICTURES = (
    METRICS.replace("{stop}", "1")
    + """trtx_embedding_cache_lookups_total{{dynamo_component="backend",outcome="hit"}} {hits}
trtx_embedding_cache_lookups_total{{outcome="joined"}} 1.0
trtx_embedding_cache_lookups_total{{outcome="miss"}} 2.0
trtx_media_seconds_total{{stage="encode"}} 5.0e-01
trtx_media_pictures_total{{stage="encode"}} 2.0
trtx_media_seconds_total{{stage="remote"}} 0.0
trtx_media_pictures_total{{stage="remote"}} 0.0
"""
)


def test_what_workers_count_of_pictures_is_read_by_role_and_nothing_of_those_that_take_none(
    servers: tuple[Served, Served],
) -> None:
    servers[0].answers["/metrics"] = PICTURES.format(hits="3.0").encode()
    with open_topology(_both(servers)) as read:
        first = read()
        servers[0].answers["/metrics"] = PICTURES.format(hits="9.0").encode()
        second = read()
    assert first.pictures is not None and second.pictures is not None
    assert second.ended_requests is not None and set(second.ended_requests) == {"prefill", "decode"}
    assert list(first.pictures) == ["prefill"]
    counts = first.pictures["prefill"]["prefill-0"]
    assert (counts.looked_up, counts.hit_rate) == (6, pytest.approx(100 * 4 / 6))
    assert (counts.ms("encode"), counts.ms("remote"), counts.ms("fetch")) == (250, None, None)
    found = grown(first.pictures, second.pictures)
    assert found is not None
    assert (found["prefill"].looked_up, found["prefill"].hit_rate, found["prefill"].ms("encode")) == (6, 100, None)
    assert grown(second.pictures, first.pictures) is None, "a worker that was started again counts anew"
    assert over_trials([found, found]) == {"prefill": found["prefill"] + found["prefill"]}
    assert over_trials([found, None]) is None and over_trials([]) is None


DECODE = """trtx_requests_total{{outcome="length"}} 30.0
trtx_whole_requests_total{{worker_id="a"}} 2.0
trtx_pair_handoffs_total{{model="m",outcome="read",prefill="prefill-0",worker_id="a"}} {read}
trtx_pair_handoffs_total{{model="m",outcome="recomputed",prefill="prefill-0",worker_id="a"}} 3.0
trtx_pair_handoff_bytes_total{{model="m",prefill="prefill-0",worker_id="a"}} 1.048576e+06
trtx_pair_handoff_seconds_total{{model="m",prefill="prefill-0",worker_id="a"}} 0.25
"""


def test_handoffs_are_read_of_decode_workers_by_the_prefill_worker_that_they_came_from(
    servers: tuple[Served, Served],
) -> None:
    plan = _both(servers)
    plan = replace(plan, processes=tuple(replace(one, gpu_indices=(), env={}) for one in plan.processes), gpu_names=())
    with open_topology(plan) as read:
        assert read().handoffs is None, "a decode worker of another trtx does not say"
        servers[1].answers["/metrics"] = DECODE.format(read=7.0).encode()
        first = read().handoffs
        servers[1].answers["/metrics"] = DECODE.format(read=9.0).encode() + b"trtx_local_prefills_total 4.0\n"
        last = read().handoffs
    counts = HandoffCounts(read=7, recomputed=3, bytes=2**20, seconds=0.25)
    assert first == {"decode-0": {NO_PREFILL: HandoffCounts(whole=2), "prefill-0": counts}}
    assert handoffs.grown(first, last) == {
        "decode-0": {NO_PREFILL: HandoffCounts(local=4), "prefill-0": HandoffCounts(read=2)}
    }
    assert handoffs.grown({"decode-0": {}}, last) == last, "a pair is there from its first request on"
    assert handoffs.grown(last, first) is None, "it was started again"
    assert handoffs.grown(first, {}) is handoffs.grown(None, last) is None
    assert handoffs.over_trials([]) is handoffs.over_trials([last, None]) is None
    both = handoffs.over_trials([first, last])
    assert both is not None and both["decode-0"]["prefill-0"].read == 16


def test_a_topology_without_decode_workers_has_no_handoffs_and_that_is_known(servers: tuple[Served, Served]) -> None:
    with open_topology(_plan(_worker("agg-0", "agg", servers[0].port, None))) as read:
        assert read().handoffs == {}


SPECULATING = """trtx_requests_total{{outcome="length"}} 30.0
trtx_drafts_total{{worker_id="a"}} {drafts}
trtx_draft_tokens_total{{position="1",worker_id="a"}} {drafts}
trtx_draft_tokens_total{{position="2",worker_id="a"}} 10.0
trtx_accepted_draft_tokens_total{{position="1",worker_id="a"}} 15.0
trtx_accepted_draft_tokens_total{{position="2",worker_id="a"}} 5.0
trtx_drafting_seconds_total{{worker_id="a"}} 0.5
trtx_step_decodes_total{{worker_id="a"}} 60.0
trtx_step_seconds_bucket{{le="0.1",worker_id="a"}} 7.0
trtx_step_seconds_sum{{worker_id="a"}} 10.0
"""


def test_drafts_are_read_of_the_workers_that_speculate(servers: tuple[Served, Served]) -> None:
    plan = _both(servers)
    plan = replace(plan, processes=tuple(replace(one, gpu_indices=(), env={}) for one in plan.processes), gpu_names=())
    with open_topology(plan) as read:
        none = read().drafts
        servers[1].answers["/metrics"] = SPECULATING.format(drafts=20.0).encode()
        first = read().drafts
        servers[1].answers["/metrics"] = SPECULATING.format(drafts=25.0).encode()
        last = read().drafts
        servers[1].answers["/metrics"] = b""
        assert read().drafts is None, "a worker that can't be read may speculate"
    counts = DraftCounts(20, 30, 20, (20, 10), (15, 5), 60, 0.5, 10.0)
    assert none == {} and first == {"decode": {"decode-0": counts}}
    assert (counts.acceptance_length, counts.tokens_per_step, counts.overhead) == (2.0, 80 / 60, 5.0)
    assert counts.acceptance_rate == pytest.approx(100 * 2 / 3) and counts.rates_at == (75.0, 50.0)
    assert draft_counters.grown(none, first) == counts, "a worker counts from its first step on"
    grown = draft_counters.grown(first, last)
    assert grown == DraftCounts(5, 5, 0, (5, 0), (0, 0), 0, 0.0, 0.0)
    assert (grown.tokens_per_step, grown.overhead, grown.rates_at) == (None, None, (0.0, None))
    assert draft_counters.grown(last, first) is None, "it was started again"
    assert draft_counters.grown(first, {}) is draft_counters.grown(None, last) is draft_counters.grown({}, {}) is None
    assert draft_counters.over_trials([counts, None]) is draft_counters.over_trials([]) is None
    both = draft_counters.over_trials([counts, grown])
    assert both is not None and (both.drafts, both.drafted_at) == (25, (25, 10))


def test_tokens_that_an_engine_does_not_count_by_position_are_counted(servers: tuple[Served, Served]) -> None:
    text = SPECULATING.format(drafts=20.0).replace('position="1"', 'position="unknown"')
    servers[0].answers["/metrics"] = "\n".join(line for line in text.splitlines() if '"2"' not in line).encode()
    with open_topology(_plan(_worker("agg-0", "agg", servers[0].port, None))) as read:
        drafts = read().drafts
    assert drafts is not None
    counts = drafts["agg"]["agg-0"]
    assert (counts.drafted, counts.accepted, counts.rates_at) == (20, 15, ())
