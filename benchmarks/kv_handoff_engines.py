"""Measures the time that a KV handoff adds to a request between two engines of one host, without a frontend.

    python benchmarks/kv_handoff_engines.py --model synthetic:qwen3-8b --gpus 0,1

There are two embedded engines, each a process with its own GPU. This process passes the prefill engine's answer to the
decode engine at once. Each prompt is handed over twice: the first time the decode engine reads all its blocks, the
second time they are in its prefix cache. ``read adds`` is the difference of the medians of the two times, from the
decode engine's submit to its second token. ``read`` is the engine's own time from ``begin_read`` to the poll that
reports the end. ``disagg adds`` is the time for the prefill engine's answer and the decode engine's second token, minus
that for two tokens of the prefill engine alone with the same uncached prompt; it includes the hops between the
processes. ``first read ms`` is the very first read.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from dataclasses import replace

from trtx.torch_engine.llmapi import LLM, DisaggregatedParams, SamplingParams

TWO = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-8b")
    parser.add_argument("--gpus", default="0,1", help="prefill's and decode's, as CUDA_VISIBLE_DEVICES takes them")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--repeats", type=int, default=12)
    options = parser.parse_args()
    os.environ["TRTX_TOPOLOGY"] = f"kv-handoff-engines-{os.getpid()}"
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    engines = []
    for gpu in options.gpus.split(","):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        engines.append(
            LLM(
                options.model, max_batch_size=8, max_num_tokens=8192, max_seq_len=max(options.tokens) + 32,
                kv_cache_config={"max_tokens": 40 * max(options.tokens)},
                cuda_graph_config={"batch_sizes": [1, 2]}, cache_transceiver_config={"backend": "NIXL"},
            )
        )  # fmt: skip
    prefill, decode = engines
    time.sleep(1)
    print(
        f"{'tokens':>7} {'read ms':>8} {'read adds ms':>13} {'disagg adds ms':>15} {'agg ms':>8} {'first read ms':>14}"
    )
    rows = []
    draw = random.Random(0)
    for tokens in options.tokens:
        rows.append(measure(prefill, decode, draw, tokens, options.repeats))
        r = rows[-1]
        print(
            f"{tokens:>7} {r['read_ms']:>8.3f} {r['read_adds_ms']:>13.3f} {r['disagg_adds_ms']:>15.3f} "
            f"{r['agg_ms']:>8.2f} {r['first_read_ms']:>14.3f}",
            flush=True,
        )
    print(json.dumps(rows))
    for engine in engines:
        engine.shutdown()


def measure(prefill: LLM, decode: LLM, draw: random.Random, tokens: int, repeats: int) -> dict[str, float]:
    first_read_ms = 0.0
    agg, whole, reading, cached, reads = [], [], [], [], []
    for repeat in range(repeats + 2):
        prompt, other = ([draw.randrange(1000, 4000) for _ in range(tokens)] for _ in range(2))
        began = time.perf_counter()
        prefill.generate_async(other, TWO).result(timeout=60)
        agg.append(time.perf_counter() - began)
        before = decode.handoff_stats()
        began = time.perf_counter()
        params = _handed(prefill, prompt)
        at = time.perf_counter()
        decode.generate_async(prompt, TWO, disaggregated_params=params).result(timeout=60)
        ended = time.perf_counter()
        whole.append(ended - began)
        reading.append(ended - at)
        after = decode.handoff_stats()
        assert after.reads - before.reads == 1 and after.recomputed == 0, after
        reads.append(after.seconds - before.seconds)
        if repeat == 0:
            first_read_ms = reads[0] * 1e3
        params = _handed(prefill, prompt)
        at = time.perf_counter()
        decode.generate_async(prompt, TWO, disaggregated_params=params).result(timeout=60)
        cached.append(time.perf_counter() - at)
        assert decode.handoff_stats().reads == after.reads

    def median_ms(seconds: list[float]) -> float:
        return statistics.median(seconds[2:]) * 1e3

    return {
        "tokens": tokens,
        "read_ms": median_ms(reads),
        "read_adds_ms": median_ms(reading) - median_ms(cached),
        "disagg_adds_ms": median_ms(whole) - median_ms(agg),
        "agg_ms": median_ms(agg),
        "first_read_ms": first_read_ms,
    }


def _handed(prefill: LLM, prompt: list[int]) -> DisaggregatedParams:
    asked = DisaggregatedParams(request_type="context_only")
    params = prefill.generate_async(prompt, TWO, disaggregated_params=asked).result(timeout=60).disaggregated_params
    assert params is not None
    return replace(params, request_type="generation_only")


if __name__ == "__main__":
    main()
