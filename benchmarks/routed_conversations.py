"""Measures whether returning conversations reach the worker that has their KV, on the GPU or in host memory.

    python benchmarks/routed_conversations.py                                          # two workers on a CPU, 4 min
    python benchmarks/routed_conversations.py --model synthetic:qwen3-8b --tokens 16384 --gpus 0,1

Each way is a topology of its own: Dynamo's frontend and ``--workers`` workers of the torch engine, with the KV router
or round-robin, with and without a host tier. The KV pools of all workers together hold a tenth of ``--conversations``
conversations of about ``--tokens`` tokens; with a tier, each worker's host memory holds all of them. ``--clients``
clients send one request after the other: a share ``--returning`` continues a conversation with ``--added`` new tokens,
not one of the last ones; the others begin a new conversation, which replaces the oldest.

A returning prompt reached the right worker if the worker that answered also answered the conversation's last turn. The
cached share is that of the prompt tokens of returning requests. TTFT is measured by the client. Each way serves every
conversation once before it is measured. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from trtx.config import TopologySpec
from trtx.launch import prepare, serve

ANSWER_TOKENS = 8
BLOCK_TOKENS = 32
WAYS: dict[str, tuple[Literal["kv", "round-robin"], bool]] = {
    "kv, tier": ("kv", True), "kv": ("kv", False),
    "round-robin, tier": ("round-robin", True), "round-robin": ("round-robin", False),
}  # fmt: skip


@dataclass
class Conversation:
    tokens: list[int]
    worker: object = None  # that answered its last turn


@dataclass
class Seen:
    """What the clients of one way saw of returning prompts."""

    first_s: list[float] = field(default_factory=list)
    right: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0


class Client:
    """One client with conversations of its own."""

    def __init__(self, url: str, model: str, options: argparse.Namespace, seed: int) -> None:
        self.options, self.model = options, model
        self.dice = random.Random(seed)
        place = urlsplit(url)
        self.connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=300)
        count = options.conversations // options.clients
        self.conversations = [Conversation(self.new_tokens(options.tokens)) for _ in range(count)]
        self.seen = Seen()

    def new_tokens(self, count: int) -> list[int]:
        return self.dice.choices(range(5, self.options.vocabulary), k=count)

    def ask(self, conversation: Conversation) -> tuple[float, object, int]:
        """Sends the conversation. Returns (seconds to the first token, the worker, cached tokens)."""
        body = {
            "model": self.model, "prompt": conversation.tokens, "max_tokens": ANSWER_TOKENS, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True,
            "nvext": {"extra_fields": ["worker_id"]},
        }  # fmt: skip
        began = time.perf_counter()
        self.connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = self.connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"HTTP {answer.status}: {answer.read(500).decode()}")
        first: float | None = None
        worker: object = None
        cached = 0
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if first is None and event.get("choices"):
                first = time.perf_counter() - began
            worker = (event.get("nvext") or {}).get("worker_id") or worker
            if usage := event.get("usage"):
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if first is None or worker is None:
            raise RuntimeError("an answer has no token, or does not say which worker made it")
        return first, worker, cached

    def begin(self) -> None:
        for conversation in self.conversations:
            _, conversation.worker, _ = self.ask(conversation)

    def run(self, requests: int) -> None:
        recent: list[Conversation] = self.conversations[-2:]
        for _ in range(requests):
            returns = self.dice.random() < self.options.returning
            if returns:
                conversation = self.dice.choice([one for one in self.conversations if one not in recent])
                conversation.tokens += self.new_tokens(self.options.added)
            else:
                conversation = Conversation(self.new_tokens(self.options.tokens))
                self.conversations = [*self.conversations[1:], conversation]
            first, worker, cached = self.ask(conversation)
            if returns:
                self.seen.first_s.append(first)
                self.seen.right += worker == conversation.worker
                self.seen.cached_tokens += cached
                self.seen.prompt_tokens += len(conversation.tokens)
            conversation.worker = worker
            recent = [*recent, conversation][-2:]


def in_threads(calls: list[Any]) -> None:
    """Runs all at once. Raises the first error."""
    problems: list[BaseException] = []

    def run(call: Any) -> None:
        try:
            call()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def measure(way: str, options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    router, has_tier = WAYS[way]
    longest = options.tokens + (options.requests + 2) * options.added
    each = -(-longest // BLOCK_TOKENS) * BLOCK_TOKENS
    pool = max(2, options.conversations // (10 * options.workers)) * each
    overrides = [
        f"max_seq_len={each + BLOCK_TOKENS}",
        f"kv_cache_config={{tokens_per_block: {BLOCK_TOKENS}, max_tokens: {pool}"
        + (f", host_cache_size: {options.host_gib * 2**30:.0f}" if has_tier else "")
        + "}",
    ]
    spec = TopologySpec(
        model=options.model, engine="torch", mode="agg", workers=options.workers, router_mode=router, port=0,
        gpus=None if options.gpus is None else tuple(int(part) for part in options.gpus.split(",")),
        overrides=tuple(overrides),
    )  # fmt: skip
    directory.mkdir()
    with serve(prepare(spec, run_dir=directory), on_event=lambda event: None) as topology:
        clients = [Client(topology.url, topology.model, options, seed) for seed in range(options.clients)]
        in_threads([client.begin for client in clients])
        began = time.perf_counter()
        in_threads([lambda client=client: client.run(options.requests) for client in clients])
        took = time.perf_counter() - began
    first = sorted(value for client in clients for value in client.seen.first_s)
    seen = [client.seen for client in clients]
    return {
        "way": way, "returning": len(first), "pool_tokens": pool,
        "right_share": sum(one.right for one in seen) / len(first),
        "cached_share": sum(one.cached_tokens for one in seen) / sum(one.prompt_tokens for one in seen),
        "ttft_p50_ms": first[len(first) // 2] * 1e3, "ttft_p90_ms": first[int(0.9 * (len(first) - 1))] * 1e3,
        "requests_s": options.requests * options.clients / took,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:tiny")
    parser.add_argument("--vocabulary", type=int, default=1000, help="ids of prompts are below")
    parser.add_argument("--gpus", help="indices, such as 0,1")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=40, help="of all clients together")
    parser.add_argument("--tokens", type=int, default=1536, help="of a conversation at its start")
    parser.add_argument("--added", type=int, default=32, help="new tokens of each turn")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--requests", type=int, default=100, help="of each client in the window of a way")
    parser.add_argument("--returning", type=float, default=0.8, help="share of the requests")
    parser.add_argument("--host-gib", type=float, default=1.0, help="host memory for KV of each worker with a tier")
    parser.add_argument("--ways", default=";".join(WAYS), help="separated by semicolons")
    options = parser.parse_args()
    rows = []
    print("| Router | Returning prompts | At the right worker | Prompt tokens cached | TTFT p50, ms | p90, ms |")
    print("|---|--:|--:|--:|--:|--:|", flush=True)
    with tempfile.TemporaryDirectory(prefix="trtx-routed-") as directory:
        for index, way in enumerate(options.ways.split(";")):
            row = measure(way, options, Path(directory) / str(index))
            rows.append(row)
            print(
                f"| {way} | {row['returning']} | {row['right_share']:.0%} | {row['cached_share']:.0%} | "
                f"{row['ttft_p50_ms']:.0f} | {row['ttft_p90_ms']:.0f} |",
                flush=True,
            )
    print(json.dumps({"options": vars(options), "argv": sys.argv[1:], "rows": rows}))


if __name__ == "__main__":
    main()
