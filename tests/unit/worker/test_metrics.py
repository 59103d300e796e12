"""The trtx_* families say what happened, in Prometheus's own arithmetic."""

from __future__ import annotations

import subprocess
import sys

from tests.unit.worker.scrapes import samples_of, text_of
from trtx.engine.api import Transfer
from trtx.engine.worker_status import HandoffsSoFar
from trtx.torch_engine.messages import HandoffStats
from trtx.worker.metrics import RequestClock, WorkerMetrics, absent_fields
from trtx.worker.transfers import TransferCounts


def scraped(metrics: WorkerMetrics) -> dict[str, float]:
    """Sample name, with its prefill worker, outcome or bucket bound, to value: as a scrape of the port sees it."""
    samples = {}
    for sample in samples_of(metrics):
        names = ("outcome", "le", "dp_rank", "position", "direction")
        one = next((sample.labels[name] for name in names if sample.labels.get(name)), None)
        tier = sample.labels.get("tier")
        label = ",".join(filter(None, (sample.labels.get("prefill"), tier if tier == "host" else None, one)))
        samples[sample.name + (f"[{label}]" if label else "")] = sample.value
    return samples


def test_tokens_of_one_chunk_count_as_many_gaps_and_the_first_as_none() -> None:
    metrics = WorkerMetrics()
    clock = RequestClock(metrics)
    for count in (1, 1, 4, 0):
        clock.tokens(count)
    seen = scraped(metrics)
    assert seen["trtx_time_to_first_token_seconds_count"] == 1
    assert seen["trtx_inter_token_latency_seconds_count"] == 5
    assert seen["trtx_generated_tokens_total"] == 6
    assert seen["trtx_chunk_tokens_count"] == 3
    assert seen["trtx_chunk_tokens_bucket[1.0]"] == 2
    assert seen["trtx_chunk_tokens_bucket[4.0]"] == 3


def test_engine_and_handoff_families_appear_once_the_engine_has_said_something() -> None:
    metrics = WorkerMetrics()
    assert "trtx_kv_blocks" not in scraped(metrics)
    metrics.iterations[0] = {
        "numActiveRequests": 3,
        "numQueuedRequests": 2,
        "newActiveRequestsQueueLatencyMS": 250.0,
        "kvCacheStats": {"maxNumBlocks": 10, "usedNumBlocks": 4, "cacheHitRate": 0.25},
        "inflightBatchingStats": {"numScheduledRequests": 3, "numCtxTokens": 17},
    }
    metrics.handoff = lambda: HandoffStats(reads=1, bytes=4096, seconds=0.5, recomputed=2, leases=1)
    seen = scraped(metrics)
    assert seen["trtx_running_requests"] == 3
    assert seen["trtx_queued_requests"] == 2
    assert seen["trtx_queue_seconds"] == 0.25
    assert seen["trtx_kv_blocks_used"] == 4
    assert seen["trtx_kv_hit_rate"] == 0.25
    assert seen["trtx_batch_context_tokens"] == 17
    assert seen["trtx_handoff_bytes_total"] == 4096
    assert seen["trtx_recomputed_prefixes_total"] == 2
    assert seen["trtx_corrupted_handoffs_total"] == 0


def test_a_host_tier_has_samples_of_its_own_in_the_families_of_the_pool() -> None:
    metrics = WorkerMetrics()
    pool = {"maxNumBlocks": 10, "usedNumBlocks": 4, "cacheHitRate": 0.25, "reusedBlocks": 5, "missedBlocks": 15}
    metrics.iterations[0] = {"kvCacheStats": pool}
    assert not any("host" in name or "tier_bytes" in name for name in scraped(metrics))
    host = {"maxNumBlocks": 99, "usedNumBlocks": 7, "reusedBlocks": 3, "storedBytes": 64, "loadedBytes": 32}
    metrics.iterations[0] = {"kvCacheStats": pool, "hostKvCacheStats": host}
    seen = scraped(metrics)
    assert (seen["trtx_kv_blocks"], seen["trtx_kv_blocks[host]"]) == (10, 99)
    assert (seen["trtx_kv_block_lookups_total[miss]"], seen["trtx_kv_block_lookups_total[host,hit]"]) == (15, 3)
    assert seen["trtx_kv_tier_bytes_total[loaded]"] == 32


def test_every_outcome_has_a_count_from_the_start() -> None:
    metrics = WorkerMetrics()
    metrics.outcomes["length"] += 1
    seen = scraped(metrics)
    assert seen["trtx_requests_total[length]"] == 1
    assert seen["trtx_requests_total[cancelled]"] == 0


def test_attention_dp_ranks_are_told_apart_and_what_an_older_engine_does_not_say_stays_away() -> None:
    metrics = WorkerMetrics()
    for rank, active in ((0, 3), (1, 5)):
        metrics.iterations[rank] = {"numActiveRequests": active, "attentionDpRank": rank}
    metrics.lost_kv_events = lambda: 4
    seen = scraped(metrics)
    assert (seen["trtx_running_requests[0]"], seen["trtx_running_requests[1]"]) == (3, 5)
    assert "trtx_queued_requests" not in seen
    assert "numQueuedRequests" in absent_fields(metrics.iterations[0])
    assert seen["trtx_lost_kv_events_total"] == 4


def test_handoffs_of_an_engine_that_counts_none_are_those_whose_requests_say_that_kv_came() -> None:
    metrics = WorkerMetrics()
    assert "trtx_handoff_reads_total" not in scraped(metrics), "an aggregated worker has none to count"
    metrics.transfers = TransferCounts()
    assert scraped(metrics)["trtx_handoff_reads_total"] == 0
    for transfer in (Transfer(4096, 0.5), Transfer(4096, 0.25), Transfer(0, 0.0)):
        metrics.transfers.ended(transfer)
    metrics.transfers.whole += 1
    metrics.transfers.local += 3
    seen = scraped(metrics)
    assert (seen["trtx_handoff_reads_total"], seen["trtx_handoff_bytes_total"]) == (2, 8192)
    assert (seen["trtx_handoff_seconds_total"], seen["trtx_whole_requests_total"]) == (0.75, 1)
    assert seen["trtx_local_prefills_total"] == 3, "which were never due"
    assert not {"trtx_leases", "trtx_recomputed_prefixes_total"} & set(seen), "nobody counts them"
    metrics.handoff = lambda: HandoffStats(reads=7)
    seen = scraped(metrics)
    assert seen["trtx_handoff_reads_total"] == 7, "an engine that counts knows best"
    assert seen["trtx_whole_requests_total"] == 1, "but of what never reached it as a handoff"


def test_handoffs_are_told_by_the_prefill_worker_that_they_came_from() -> None:
    metrics = WorkerMetrics()
    metrics.transfers = transfers = TransferCounts()
    for prefill, transfer in (
        ("prefill-0", Transfer(4096, 0.5)),
        ("prefill-0", Transfer(0, 0.0)),
        ("prefill-1", Transfer(0, 0.0, "no device leads there")),
        (None, None),
    ):
        transfers.ended(transfer, prefill)
    metrics.handoff = lambda: HandoffStats(reads=1)  # an engine's own counts name no pair
    seen = scraped(metrics)
    assert seen["trtx_pair_handoffs_total[prefill-0,read]"] == 1
    assert seen["trtx_pair_handoffs_total[prefill-0,nothing]"] == 1
    assert seen["trtx_pair_handoffs_total[prefill-0,recomputed]"] == 0
    assert seen["trtx_pair_handoffs_total[prefill-1,recomputed]"] == 1
    assert seen["trtx_pair_handoffs_total[unknown,unknown]"] == 1
    assert seen["trtx_pair_handoff_bytes_total[prefill-0]"] == 4096
    assert seen["trtx_pair_handoff_bytes_total[prefill-1]"] == 0
    assert transfers.so_far() == HandoffsSoFar(1, 1, 0, "prefill-1", "no device leads there")


def test_no_handoff_is_told_of_where_requests_do_not_say() -> None:
    metrics = WorkerMetrics()
    metrics.transfers = TransferCounts()
    metrics.transfers.ended(Transfer(4096, 0.5))
    metrics.transfers.ended(None)
    assert "trtx_handoff_reads_total" not in scraped(metrics), "some came and nobody knows how many"


def step(number: int, **more: object) -> dict[str, object]:
    row = {"iter": number, "iterLatencyMS": 20.0, "numActiveRequests": 1, "numNewActiveRequests": 0}
    return {**row, "inflightBatchingStats": {"numCtxTokens": 8, "numGenRequests": 3}, **more}


def test_steps_are_summed_once_each() -> None:
    metrics = WorkerMetrics()
    metrics.saw_iteration(step(1, numNewActiveRequests=2, newActiveRequestsQueueLatencyMS=250.0, deviceWaitMS=5.0))
    metrics.saw_iteration(step(2, deviceWaitMS=7.0))
    metrics.saw_iteration(step(2, deviceWaitMS=7.0, numActiveRequests=0))  # the last step again, with other blocks
    seen = scraped(metrics)
    assert (seen["trtx_step_seconds_count"], seen["trtx_step_seconds_sum"]) == (2, 0.04)
    assert (seen["trtx_step_prompt_tokens_total"], seen["trtx_step_decodes_total"]) == (16, 6)
    assert (seen["trtx_admitted_requests_total"], seen["trtx_admitted_queue_seconds_total"]) == (2, 0.5)
    assert seen["trtx_step_device_wait_seconds_total"] == 0.012
    assert seen["trtx_running_requests"] == 0, "a gauge follows the last row"


def test_ranks_number_their_steps_for_themselves() -> None:
    metrics = WorkerMetrics()
    for rank in (0, 1):
        metrics.saw_iteration(step(1, attentionDpRank=rank))
    assert scraped(metrics)["trtx_step_seconds_count"] == 2


def test_an_engine_that_reports_no_steps_has_no_sums_over_steps() -> None:
    metrics = WorkerMetrics()
    metrics.saw_iteration({"iter": 7, "iterLatencyMS": 20.0, "numActiveRequests": 1})  # as the paced engine
    seen = scraped(metrics)
    assert not [name for name in seen if name.startswith(("trtx_step_", "trtx_admitted_", "trtx_preemptions"))]
    assert seen["trtx_iteration_seconds"] == 0.02


def test_fields_of_the_torch_engine_have_families() -> None:
    metrics = WorkerMetrics()
    metrics.saw_iteration(
        step(
            1,
            numPreemptions=4,
            numGraphMisses=5,
            guidedDecodingStats={"numCompiled": 1, "numReused": 2, "numCached": 1},
            kvCacheStats={"reusedBlocks": 6, "missedBlocks": 2},
        )
    )
    seen = scraped(metrics)
    assert (seen["trtx_preemptions_total"], seen["trtx_graph_misses_total"]) == (4, 5)
    assert (seen["trtx_grammar_lookups_total[compiled]"], seen["trtx_grammar_lookups_total[cached]"]) == (1, 2)
    assert (seen["trtx_kv_block_lookups_total[hit]"], seen["trtx_kv_block_lookups_total[miss]"]) == (6, 2)


def test_drafts_are_summed_by_position() -> None:
    metrics = WorkerMetrics()
    for number, (drafted, accepted) in enumerate((([2, 1], [1, 0]), ([], []), ([1], [1]))):
        stats = {
            "numRequestsWithDraftTokens": len(drafted) and drafted[0], "iterLatencyMS": 500.0,
            "numDraftTokensByPosition": drafted, "numAcceptedTokensByPosition": accepted,
        }  # fmt: skip
        metrics.saw_iteration(step(number, specDecodingStats=stats))
    seen = scraped(metrics)
    assert (seen["trtx_drafts_total"], seen["trtx_drafting_seconds_total"]) == (3, 1.5)
    assert [seen[f"trtx_draft_tokens_total[{position}]"] for position in (1, 2)] == [3, 1]
    assert [seen[f"trtx_accepted_draft_tokens_total[{position}]"] for position in (1, 2)] == [2, 0]
    assert "trtx_drafts_total" not in scraped(WorkerMetrics()), "only an engine that speculates has them"


def test_drafted_tokens_of_an_engine_that_does_not_report_positions_are_counted() -> None:
    """TensorRT-LLM: the sums over positions stay right."""
    metrics = WorkerMetrics()
    stats = {
        "numRequestsWithDraftTokens": 2, "iterLatencyMS": 0.0, "numDraftTokens": 6, "numAcceptedTokens": 4,
    }  # fmt: skip
    for number in range(2):
        metrics.saw_iteration(step(number, specDecodingStats=stats))
    seen = scraped(metrics)
    assert seen["trtx_draft_tokens_total[unknown]"] == 12 and seen["trtx_accepted_draft_tokens_total[unknown]"] == 8


def test_a_process_that_has_ended_has_no_samples() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    metrics = WorkerMetrics()
    metrics.processes["engine"] = ended.pid
    text = text_of(metrics)
    for family in ("process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"):
        assert f'{family}{{process="worker"}} ' in text
        assert f'{family}{{process="engine"}} ' not in text
