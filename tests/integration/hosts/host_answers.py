"""Prompts and the tokens that one engine says to them; and what listens on a host."""

from __future__ import annotations

import re
import subprocess
from typing import Any

from namespaces import Host
from processes import HTTP

from trtx.torch_engine.llmapi import LLM, SamplingParams

MODEL = "synthetic:tiny"
BLOCK = 16
TORCH: dict[str, Any] = {
    "max_seq_len": 512,
    "max_batch_size": 16,
    "kv_cache_config": {"tokens_per_block": BLOCK, "max_tokens": 8192},
}
PROMPTS = [
    [(seed * 31 + at * 13) % 1000 + 5 for at in range(length)] for seed, length in enumerate((1, 16, 33, 90, 300))
]
_NEW_TOKENS = 20


def of_one_engine() -> list[list[int]]:
    """What one engine says to each of the prompts, in a process of this machine."""
    engine = LLM(MODEL, **TORCH)
    try:
        params = SamplingParams(max_tokens=_NEW_TOKENS, ignore_eos=True)
        return [engine.generate_async(prompt, params).result(timeout=60).outputs[0].token_ids for prompt in PROMPTS]
    finally:
        engine.shutdown()


def answer(url: str, model: str, prompt: list[int]) -> list[int]:
    """The ids of an answer's tokens."""
    body = {"model": model, "prompt": prompt, "max_tokens": _NEW_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    said = HTTP.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    return [int(token.removeprefix("token_id:")) for token in said["choices"][0]["logprobs"]["tokens"]]


def hit_rate(url: str, model: str, metrics: list[str]) -> float:
    """Of the prompt tokens of all workers, whose ``metrics`` are at these addresses, those found in a prefix cache.

    9 prefixes of 128 tokens, each asked 4 times with 16 tokens of its own. 9 is odd: in turn over two workers each
    prefix would come to each of them.
    """
    for turn in range(4):
        for prefix in range(9):
            own = [(turn * 97 + prefix * 11 + at * 7) % 1000 + 5 for at in range(16)]
            answer(url, model, [(prefix * 101 + at * 13) % 1000 + 5 for at in range(128)] + own)
    texts = [HTTP.get(address, timeout=10).text for address in metrics]
    cached, prompts = (
        [float(re.findall(rf"^trtx_{name}_tokens_total\{{.*\}} (\S+)$", text, re.MULTILINE)[0]) for text in texts]
        for name in ("cached", "prompt")
    )
    assert all(prompts), "every worker has served"
    return sum(cached) / sum(prompts)


BEST_HIT_RATE = 3 / 4 * 128 / 144


def listening(host: Host) -> dict[int, list[tuple[str, int]]]:
    """Process -> address and port of each of its sockets on a host, TCP and UDP, on which something is waited for."""
    found: dict[int, list[tuple[str, int]]] = {}
    with host.entered():
        for protocol in ("-t", "-u"):
            argv = ["ss", "-Hlnp", protocol]
            for line in subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines():
                address, _, port = line.split()[3].rpartition(":")
                for pid in re.findall(r"pid=(\d+)", line) or ["0"]:
                    found.setdefault(int(pid), []).append((address, int(port)))
    return found
