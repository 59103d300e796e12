"""The trtllm_* families of a worker, from the rows and requests that any engine reports."""

from __future__ import annotations

from typing import Any

from dynamo.prometheus_names import trtllm_additional

from tests.unit.worker.scrapes import samples_of
from trtx.engine.api import Transfer
from trtx.worker.metrics import WorkerMetrics
from trtx.worker.requests.stage_clock import EndedRequest
from trtx.worker.served_families.trtllm_families import FAMILIES
from trtx.worker.trtllm_metrics import TrtllmMetrics

ROW: dict[str, Any] = {
    "iter": 7,
    "iterLatencyMS": 4.0,
    "numActiveRequests": 3,
    "numCompletedRequests": 2,
    "maxNumActiveRequests": 8,
    "gpuMemUsage": 0,
    "kvCacheStats": {"maxNumBlocks": 10, "usedNumBlocks": 4, "reusedBlocks": 5},
    "inflightBatchingStats": {"numContextRequests": 2, "numCtxTokens": 100},
}

DRAFTS = {"numDraftTokens": 6, "numAcceptedTokens": 4, "numRequestsWithDraftTokens": 3, "iterLatencyMS": 1.0}


def worker(**more: Any) -> WorkerMetrics:
    metrics = WorkerMetrics()
    settings: dict[str, Any] = {"reads_kv": True, "event_buffer": None, "lost_events": lambda: 0}
    metrics.trtllm = TrtllmMetrics("torch", **settings | more)
    return metrics


def scraped(metrics: WorkerMetrics) -> dict[str, float]:
    """The value of each sample of trtllm_* with engine_type, by name and further labels."""
    samples = {}
    for sample in samples_of(metrics):
        if sample.name.startswith("trtllm_"):
            assert sample.labels.pop("engine_type") == "torch"
            name = sample.name.removeprefix("trtllm_")
            samples[name + "".join(f"[{value}]" for value in sample.labels.values())] = sample.value
    return samples


def ended(outcome: str = "length", **times: Any) -> EndedRequest:
    return EndedRequest(id="1", worker="agg-0", role="agg", outcome=outcome, arrived_ns=1, **{"ended_s": 2.0} | times)


def test_every_name_of_dynamos_worker_for_tensorrt_llm_has_a_record() -> None:
    names = {value for name, value in vars(trtllm_additional).items() if not name.startswith("_")}
    assert names <= FAMILIES.keys()


def test_a_request_that_ended_is_counted_with_its_times_and_a_failed_one_is_not() -> None:
    metrics = worker()
    assert metrics.trtllm is not None
    times = {"queue_s": 0.2, "prefill_s": 0.3, "decode_s": 1.0, "first_chunk_s": 0.6, "last_chunk_s": 1.6}
    metrics.trtllm.ended(ended(prompt_tokens=40, cached_tokens=16, tokens=11, **times))
    metrics.trtllm.ended(ended("error", prompt_tokens=40))
    metrics.trtllm.ended(ended("cancelled"))
    seen = scraped(metrics)
    assert seen["request_success_total[length]"] == seen["request_success_total[cancelled]"] == 1
    assert seen["num_aborted_requests_total"] == 1
    assert seen["e2e_request_latency_seconds_sum"] == 4
    assert seen["time_per_output_token_seconds_sum"] == 0.1
    assert seen["request_inference_time_seconds_sum"] == 1.3
    assert seen["request_queue_time_seconds_count"] == seen["time_to_first_token_seconds_count"] == 1
    assert [seen[f"{name}_tokens_total"] for name in ("prompt", "generation", "prompt_cached")] == [40, 11, 16]


def test_iteration_stats_become_tensorrt_llms_gauges_and_an_unknown_value_has_no_sample() -> None:
    metrics = worker()
    metrics.saw_iteration(ROW)
    metrics.saw_iteration(ROW | {"iter": 8, "specDecodingStats": DRAFTS})
    seen = scraped(metrics)
    assert seen["num_requests_running"] == 3 and seen["num_requests_completed_total"] == 4
    assert seen["iteration_latency_seconds"] == 0.004
    assert seen["kv_cache_utilization"] == 0.4 and seen["prefill_batch_occupancy"] == 0.25
    assert seen["prefill_batch_tokens_sum"] == 200
    assert seen["spec_decode_num_accepted_tokens_total"] == 4
    unknown = (
        "kv_cache_missed_blocks_total",
        "gpu_memory_usage_bytes",
        "kv_event_buffer_capacity",
        "num_paused_requests",
    )
    assert not seen.keys() & set(unknown)


def test_a_row_that_repeats_a_step_is_not_summed_again() -> None:
    metrics = worker()
    row = ROW | {"specDecodingStats": DRAFTS}
    metrics.saw_iteration(row)
    metrics.saw_iteration(row | {"kvCacheStats": {"maxNumBlocks": 10, "usedNumBlocks": 5}})
    seen = scraped(metrics)
    assert seen["spec_decode_num_draft_tokens_total"] == 6 and seen["num_requests_completed_total"] == 2
    assert seen["prefill_batch_tokens_count"] == 1
    assert seen["kv_cache_used_blocks"] == 5, "gauges follow the last row"
    metrics.saw_iteration(row | {"attentionDpRank": 1})
    assert scraped(metrics)["spec_decode_num_draft_tokens_total"] == 12, "each rank numbers its own steps"


def test_reads_of_kv_and_of_events_are_distributions() -> None:
    metrics = worker(event_buffer=1024, lost_events=lambda: 3)
    assert metrics.trtllm is not None
    metrics.trtllm.transferred(Transfer(4_000_000, 0.002))
    metrics.trtllm.transferred(Transfer(0, 0.0, "the lease has ended"))
    metrics.trtllm.read_events(5)
    seen = scraped(metrics)
    assert seen["kv_transfer_success_total"] == 1 and seen["kv_transfer_speed_gb_s_sum"] == 2
    assert seen["kv_transfer_bytes_bucket[5000000.0]"] == 1
    assert seen["kv_event_buffer_capacity"] == 1024 and seen["kv_event_id_gap_events_total"] == 3
    assert seen["kv_event_drain_batch_size_bucket[8.0]"] == 1
    assert not any(name.startswith("kv_transfer") for name in scraped(worker(reads_kv=False)))
