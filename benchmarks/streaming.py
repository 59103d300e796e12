"""Measures how fast tokens reach a client, for trtx's frontend and worker and for upstream's, side by side in one run.

(a) Time to first token of a stream on a keep-alive connection, compared with the whole request without streaming, on
    an engine without delay. Nagle's algorithm on the listener would appear as 40 ms.
(b) Tokens/s that reach 256 clients from an engine paced at 4 ms steps, which offers 64,000 tokens/s. Each chunk takes
    60 to 75 us in Python, so the number of tokens per chunk matters.

    python benchmarks/streaming.py [--rounds 3] [--only ttft|throughput]

The client is ``raw_client.py``: asyncio sockets that parse nothing while a stream runs, in two processes for (b). It
raises on an incomplete answer.
Rounds are interleaved, so that other load on the machine affects all setups alike; numbers are medians over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import random
import shutil
import signal
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raw_client import all_at_once, one_after_another
from tokenizers import Tokenizer, models, pre_tokenizers

from trtx.checkpoint import resolve_checkpoint

STREAMS = 256
STEP_MS = 4.0
CLIENT_PROCESSES = 2
START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Setup:
    """The arguments after ``python`` of one frontend and one worker."""

    name: str
    frontend: list[str]
    worker: list[str]
    model_name: str


def setups(model: Path, directory: Path, itl_ms: float) -> list[Setup]:
    config = directory / f"paced-{itl_ms:g}.yaml"
    config.write_text(f"paced_ttft_ms: 0\npaced_itl_ms: {itl_ms}\n", encoding="utf-8")
    ours = ["-m", "trtx.frontend"]
    named = ["--model", str(model), "--served-model-name", "paced"]
    one_token = str(Path(__file__).with_name("one_token_a_chunk.py"))
    sample = ["-m", "dynamo.common.backend.sample_main", "--model-name", str(model), "--component", "backend"]
    planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq", "--disable-kv-routing"]
    return [
        Setup(
            "trtx.frontend, trtx.worker, paced engine",
            ours,
            ["-m", "trtx.worker", "--role", "agg", "--engine", "paced", *named, "--engine-config", str(config)],
            "paced",
        ),
        Setup(
            "dynamo.frontend, paced engine, one token a chunk",
            ["-m", "dynamo.frontend"],
            [one_token, *named, "--itl-ms", str(itl_ms)],
            "paced",
        ),
        Setup(
            "dynamo.frontend, dynamo's sample engine",
            ["-m", "dynamo.frontend"],
            [*sample, *planes, "--delay", str(itl_ms / 1000)],
            str(model),
        ),
    ]


def word_model(directory: Path) -> Path:
    """Creates a model directory in which every token is one word.

    Dynamo's sample engine emits token ids from 1 upwards. In a byte-level vocabulary these are pieces of characters,
    and the frontend's detokenizer would dominate the measurement instead of the streaming.
    """
    model = directory / "model"
    shutil.copytree(resolve_checkpoint("synthetic:tiny").path, model, ignore=shutil.ignore_patterns("*.safetensors"))
    words = ["".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=3)]
    vocabulary = {"<unk>": 0} | {word: number for number, word in enumerate(words, start=1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(model / "tokenizer.json"))
    return model


def free_port() -> int:
    """Returns a free port below 32768, because Dynamo 1.6.1 reads DYN_SYSTEM_PORT as a signed 16-bit number."""
    while True:
        port = random.randrange(10_000, 32_767)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def serving(setup: Setup, directory: Path) -> Iterator[int]:
    """A context manager that serves ``setup`` and yields its HTTP port once it is ready."""
    port, xsub, xpub = free_port(), free_port(), free_port()
    own = Path(tempfile.mkdtemp(dir=directory))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DYN_")} | {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(own / "kv"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "lo",
        "DYN_SYSTEM_HOST": "127.0.0.1",
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
        "DYN_ZMQ_BROKER_URL": f"xsub=tcp://127.0.0.1:{xsub} , xpub=tcp://127.0.0.1:{xpub}",
        "DYN_LOG": "error",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    frontend = [*setup.frontend, "--http-host", "127.0.0.1", "--http-port", str(port)]
    if "trtx.frontend" in setup.frontend:
        frontend += ["--broker-xsub", f"tcp://127.0.0.1:{xsub}", "--broker-xpub", f"tcp://127.0.0.1:{xpub}"]
    children = []
    with (own / "log").open("wb") as log:
        try:
            for argv, extra in ((frontend, {}), (setup.worker, {"DYN_SYSTEM_PORT": str(free_port())})):
                children.append(
                    subprocess.Popen([sys.executable, *argv], env=environment | extra, stdout=log, stderr=log)
                )
            _wait_ready(port, setup.model_name, children, own / "log")
            yield port
        finally:
            for child in reversed(children):
                child.send_signal(signal.SIGTERM)
            for child in children:
                try:
                    child.wait(15)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()


def _wait_ready(port: int, model: str, children: list[subprocess.Popen[bytes]], log: Path) -> None:
    body = json.dumps({"model": model, "prompt": "a", "max_tokens": 1}).encode()
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if any(child.poll() is not None for child in children):
            break
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(request, timeout=10):
            return
        time.sleep(0.05)
    raise SystemExit(f"not ready:\n{log.read_text(errors='replace')[-3000:]}")


def body_of(setup: Setup, tokens: int, *, stream: bool) -> dict[str, Any]:
    body = {"model": setup.model_name, "prompt": "aaa aab aac aad", "max_tokens": tokens, "stream": stream}
    body["ignore_eos"] = True  # the sample engine also emits the end-of-sequence ids
    return body | ({"stream_options": {"include_usage": True}} if stream else {})


def measure_ttft(model: Path, directory: Path, rounds: int, requests: int) -> None:
    print(f"\n(a) kept-alive connection, engine without delay, {requests} requests a round, 8 tokens, ms (median)\n")
    results: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for setup in setups(model, directory, 0.0):
            with serving(setup, directory) as port:
                one_after_another(port, body_of(setup, 8, stream=True), 20)
                streaming = one_after_another(port, body_of(setup, 8, stream=True), requests)
                unary = one_after_another(port, body_of(setup, 8, stream=False), requests)
            results.setdefault(setup.name, []).append(
                (
                    1000 * statistics.median(a.first_event - a.sent for a in streaming),
                    1000 * statistics.median(a.done - a.sent for a in unary),
                )
            )
    print(f"{'':50} {'TTFT':>8} {'unary':>8} {'difference':>11}")
    for name, pairs in results.items():
        ttft, unary_ms = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{name:50} {ttft:8.2f} {unary_ms:8.2f} {ttft - unary_ms:11.2f}")


def measure_throughput(model: Path, directory: Path, rounds: int, tokens: int) -> None:
    offered = STREAMS / STEP_MS * 1000
    print(f"\n(b) {STREAMS} streams of {tokens} tokens, {STEP_MS:g} ms steps: {offered:,.0f} tokens/s offered\n")
    results: dict[str, list[tuple[float, float, float]]] = {}
    for _ in range(rounds):
        for setup in setups(model, directory, STEP_MS):
            with serving(setup, directory) as port:
                all_at_once(port, body_of(setup, 20, stream=True), STREAMS, CLIENT_PROCESSES)
                answers = all_at_once(port, body_of(setup, tokens, stream=True), STREAMS, CLIENT_PROCESSES)
            total = sum(a.tokens for a in answers)
            if total != STREAMS * tokens:
                raise SystemExit(f"{setup.name}: {total} tokens arrived, expected {STREAMS * tokens}")
            seconds = max(a.done for a in answers) - min(a.sent for a in answers)
            results.setdefault(setup.name, []).append(
                (
                    total / seconds,
                    total / sum(a.events for a in answers),
                    1000 * statistics.median(a.first_event - a.sent for a in answers),
                )
            )
    medians = {n: tuple(statistics.median(c) for c in zip(*rows, strict=True)) for n, rows in results.items()}
    baseline = medians["dynamo.frontend, paced engine, one token a chunk"][0]
    print(f"{'':50} {'tokens/s':>9} {'ratio':>6} {'tokens/event':>13} {'TTFT ms':>8}")
    for name, (rate, width, ttft) in medians.items():
        print(f"{name:50} {rate:9,.0f} {rate / baseline:6.2f} {width:13.2f} {ttft:8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=100, help="of (a), each way")
    parser.add_argument("--tokens", type=int, default=800, help="of each stream of (b)")
    parser.add_argument("--only", choices=("ttft", "throughput"))
    args = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"client: benchmarks/raw_client.py (asyncio sockets, no parsing), {CLIENT_PROCESSES} processes in (b)")
    with tempfile.TemporaryDirectory(prefix="trtx-streaming-") as name:
        model = word_model(Path(name))
        if args.only != "throughput":
            measure_ttft(model, Path(name), args.rounds, args.requests)
        if args.only != "ttft":
            measure_throughput(model, Path(name), args.rounds, args.tokens)


if __name__ == "__main__":
    main()
