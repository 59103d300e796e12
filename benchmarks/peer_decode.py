"""Measures the decode and prefill speed of vLLM without HTTP, as engine_decode.py does for the embedded engine.

    PYTHONPATH=<where vllm is> python benchmarks/peer_decode.py --model DIR --batch 1,8,64,256 --isl 512 --osl 128

vLLM uses random weights (``load_format dummy``) in the shape of DIR's config.json, greedy decoding and no prefix cache.
All prompts of a batch are submitted at once. Prefill is the time to one token of each sequence, decode the additional
time for ``osl - 1`` more tokens; both are medians of three. Tested with vLLM 0.24.0. The last line of stdout is one
JSON document with the rows of engine_decode.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from typing import Any

ROUNDS = 3

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # otherwise, vLLM's start hangs for minutes on a machine without a network
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def seconds(llm: Any, params: type, batch: int, isl: int, osl: int) -> float:
    """Returns the seconds until every sequence of a batch has ``osl`` tokens."""
    prompts = [{"prompt_token_ids": [random.randint(10, 1000) for _ in range(isl)]} for _ in range(batch)]
    asked = params(max_tokens=osl, ignore_eos=True, temperature=0.0, detokenize=False)
    began = time.perf_counter()
    llm.generate(prompts, asked, use_tqdm=False)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory with a config.json")
    parser.add_argument("--batch", default="1,8,64,256")
    parser.add_argument("--isl", type=int, default=512, help="prompt tokens")
    parser.add_argument("--osl", type=int, default=128, help="generated tokens")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share each layer")
    options = parser.parse_args()
    batches = [int(text) for text in options.batch.split(",")]
    import vllm
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(model=options.model, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False,
              max_model_len=options.isl + options.osl + 16, max_num_seqs=max(batches), tensor_parallel_size=options.tp,
              gpu_memory_utilization=0.85)  # fmt: skip
    start_s = time.perf_counter() - began
    seconds(llm, SamplingParams, min(4, max(batches)), 128, 16)
    print(f"vllm {vllm.__version__}, start {start_s:.0f} s, ISL {options.isl}, OSL {options.osl}")
    rows = []
    for batch in batches:
        prefills, wholes = (
            [seconds(llm, SamplingParams, batch, options.isl, osl) for _ in range(ROUNDS)] for osl in (1, options.osl)
        )
        prefill, whole = statistics.median(prefills), statistics.median(wholes)
        row = {"batch": batch, "prefill_tokens_per_s": batch * options.isl / prefill, "kind": "greedy"}
        if options.osl > 1:
            row["decode_tokens_per_s"] = batch * (options.osl - 1) / (whole - prefill)
        rows.append(row)
        print(row, flush=True)
    print(json.dumps({"model": options.model, "peer": f"vllm {vllm.__version__}", "start_s": start_s, "rows": rows}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
