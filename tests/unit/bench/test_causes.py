"""Where a cell's time went, and which cause of slowness is named: only one that its evidence shows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from slow_cells import START_NS, TOKENS, SlowCell, Times, evenly, planted, request, sound

from trtx.bench.explain import explain
from trtx.bench.judge.causes import all_causes
from trtx.bench.readings import GpuReading
from trtx.bench.stage_rows import WorkerUse
from trtx.bench.stages import UNACCOUNTED, split_request, split_requests

CAUSES = tuple(cause.name for cause in all_causes())


@pytest.mark.parametrize("mode", ["agg", "disagg"])
def test_the_stages_add_up_to_what_the_client_measured(mode: str) -> None:
    times = Times(device_wait=0.1, late_stream=0.004)
    record, rows = request(0, times, mode=mode)

    split = split_request(record, rows)

    assert split.ttft is not None and split.itl is not None
    assert sum(split.ttft.values()) == pytest.approx(record.time_to_first_token, rel=0.02)
    assert sum(split.itl.values()) == pytest.approx(record.inter_token_latency, rel=0.02)
    assert split.ttft["queue"] == pytest.approx(1e3 * times.queue)
    assert split.ttft["prefill"] == pytest.approx(1e3 * times.prefill)
    assert split.ttft.get("handoff", 0.0) == pytest.approx(1e3 * times.hop if mode == "disagg" else 0.0)
    assert split.ttft[UNACCOUNTED] == pytest.approx(0.0, abs=0.5)
    assert split.itl["decode steps"] == pytest.approx(1e3 * times.decode / (TOKENS - 1))


def test_an_unknown_stage_is_no_zero() -> None:
    record, (row,) = request(0, Times())

    assert split_request(record, [replace(row, queue_s=None)]).ttft is None
    assert split_request(record, [replace(row, decode_s=None)]).itl is None
    assert "media" not in (split_request(record, [row]).ttft or {})


def test_a_request_that_moved_to_another_worker_has_no_split() -> None:
    record, (row,) = request(0, Times())

    assert split_request(record, [row, replace(row, worker="agg-1")]).ttft is None


def test_a_queue_after_the_first_token_is_no_part_of_ttft() -> None:
    record, (of_prompt, decode) = request(0, Times(), mode="disagg")

    split = split_request(record, [of_prompt, replace(decode, queue_s=0.5)])

    assert split.ttft is not None
    assert sum(split.ttft.values()) == pytest.approx(record.time_to_first_token, rel=0.02)


def test_the_first_token_that_came_late_is_not_counted_twice() -> None:
    """What the engine decoded before the client had the first token is a part of TTFT."""
    record, rows = request(0, Times(stream=0.050, late_stream=-0.048))

    split = split_request(record, rows)

    assert split.itl is not None and split.ttft is not None
    assert split.ttft["stream"] == pytest.approx(50.0, abs=0.5)
    assert sum(split.itl.values()) == pytest.approx(record.inter_token_latency, rel=0.02)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CAUSES)
def test_a_planted_cause_is_named_with_its_numbers(name: str, seed: int) -> None:
    found = dict(planted(seed))[name].explained()

    assert [one.cause.name for one in found.causes] == [name], found.sentences
    assert any(character.isdigit() for character in found.causes[0].evidence)


@pytest.mark.parametrize("seed", range(20))
def test_no_cause_is_named_where_nothing_stands_out(seed: int) -> None:
    found = sound(seed).explained()

    assert found.unknown is None
    assert found.causes == ()
    assert len(found.parts) == 2


def test_a_cause_without_its_evidence_is_not_named() -> None:
    cells = dict(planted(0))
    cells["throttled GPU"].gpus = None
    cells["worker on one core"].uses.clear()
    host = cells["host-bound engine"]
    host.rows = [replace(row, device_wait_s=None) for row in host.rows]

    for name in ("throttled GPU", "worker on one core", "host-bound engine"):
        assert cells[name].explained().causes == ()


def test_few_requests_name_no_cause() -> None:
    assert evenly(Times(queue=0.5), count=9).explained().causes == ()


def test_nothing_is_explained_by_the_few_requests_whose_stages_are_known() -> None:
    cell = evenly(Times(queue=0.5))

    found = explain("cell", len(cell.records), split_requests(cell.records, cell.rows[:20]), (), ())

    assert found.unknown == "the stages of only 20 of 40 answered requests are known, so they explain nothing"
    assert found.causes == ()


def test_a_cell_without_rows_names_nothing() -> None:
    assert SlowCell().explained().unknown is not None


def test_what_bounds_a_part_is_told_only_where_it_was_measured() -> None:
    cell = evenly(Times(device_wait=0.115))
    cell.gpus = (GpuReading("GPU 0", 1900, 1980, ()),) * 5
    memory = cell.explained().parts[1]
    unknown = evenly(Times()).explained().parts[1]

    assert memory.bound == "memory" and "95.8 %" in memory.sentence
    assert unknown.bound is None and "bound" not in unknown.sentence


def test_an_engine_without_a_gpu_is_not_bound_by_one() -> None:
    cell = evenly(Times(device_wait=0.115))
    assert cell.gpus == ()

    assert cell.explained().parts[1].bound is None


def test_a_worker_that_shares_its_one_core_with_others_waits_for_it() -> None:
    """It can't use 85% of a core that other processes use too, but more cores would help it."""
    cell = evenly(Times())
    cell.uses = [
        WorkerUse(worker="agg-0", at_ns=START_NS + n * 10**9, cores=1, cpu_s=0.5 * n, waited_s=1.3 * n)
        for n in range(5)
    ]
    (found,) = cell.explained().causes
    assert (found.cause.name, found.evidence) == (
        "worker on one core",
        "agg-0 may use 1 core, used 50 % of it and waited for it in 100 % of the time",
    )

    cell.uses = [replace(use, cpu_s=0.3 * use.cpu_s, waited_s=0.2 * use.cpu_s) for use in cell.uses]
    assert cell.explained().causes == ()


def test_long_prompts_that_fill_the_tail_do_not_hide_those_that_wait_behind_them() -> None:
    cell = SlowCell()
    for number in range(10):
        at_s = 2.0 * number
        cell.add(Times(prompt_tokens=4096, prefill=0.8, queue=0.2), at_s=at_s)
        cell.add(Times(prompt_tokens=64, queue=0.9, prefill=0.02), at_s=at_s + 0.02)
        for after in range(4):
            cell.add(Times(prompt_tokens=64, prefill=0.02), at_s=at_s + 1.7 + 0.02 * after)

    (found,) = cell.explained().causes

    assert found.cause.name == "head of line"


def test_the_hop_to_the_decode_worker_is_no_slow_handoff_of_kv() -> None:
    """The KV of these requests is read in 2 ms; what takes long is the way through the frontend."""
    assert evenly(Times(hop=0.120), mode="disagg").explained().causes == ()

    of_engine = evenly(Times(hop=0.120), mode="disagg")
    of_engine.rows = [replace(row, read_s=None) for row in of_engine.rows]
    (found,) = of_engine.explained().causes
    assert found.cause.name == "slow handoff"


def test_a_first_token_without_text_is_no_slow_client() -> None:
    """The client counts TTFT to the first text. The answer's end comes in time."""
    assert evenly(Times(stream=0.050, late_stream=-0.048)).explained().causes == ()

    (found,) = evenly(Times(stream=0.050)).explained().causes
    assert found.cause.name == "slow client"
    assert found.evidence.endswith("and answers end 49.8 ms after their last chunk was sent")


def test_a_read_that_waits_for_the_end_of_a_step_is_no_slow_handoff() -> None:
    """Steps of 35 ms: an engine under load begins and ends its reads between two of them."""
    assert evenly(Times(read=0.050, decode=0.560), mode="disagg").explained().causes == ()
