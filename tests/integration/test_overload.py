"""More clients than a topology can serve: the requests that it takes end whole, and the others are refused at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from topology_clients import ServeCommand, post, trtx_serve, wait_until

SLOTS = 8
QUEUED = 16
QUEUE_S = 3
TIMEOUT_S = 6
TOKENS = 40
BOUNDED = (
    *("--engine", "paced", "--set", "paced_itl_ms=5", "--set", "paced_ttft_ms=20", "--workers", "2"),
    *("--set", f"max_batch_size={SLOTS // 2}", "--router-mode", "least-loaded"),
    *("--max-queued-requests", str(QUEUED), "--max-queue-s", str(QUEUE_S), "--max-request-s", str(TIMEOUT_S)),
)


@dataclass
class Seen:
    """What clients saw: whole answers with their time to the first text, refusals with their time, and the rest."""

    ttft_s: list[float] = field(default_factory=list)
    first_refused_s: list[float] = field(default_factory=list)  # when all clients come at once
    refused_s: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    retry_after: set[str | None] = field(default_factory=set)
    sentences: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def told(self) -> str:
        return (
            f"{len(self.ttft_s)} taken, TTFT {_told(self.ttft_s)}; refused {dict(self.statuses)}, when all came at "
            f"once {_told(self.first_refused_s)}, then {_told(self.refused_s)}; Retry-After "
            f"{sorted(map(str, self.retry_after))}"
        )


def _told(seconds: list[float]) -> str:
    return f"p50 {1e3 * _share(seconds, 0.5):.1f} ms, p99 {1e3 * _share(seconds, 0.99):.1f} ms"


def _share(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")


async def load(url: str, clients: int, seconds: float, seen: Seen) -> None:
    """Closed-loop clients that come back after ``Retry-After``."""
    end = time.monotonic() + seconds
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        await asyncio.gather(*(_client(session, url, number, end, seen) for number in range(clients)))


async def _client(session: aiohttp.ClientSession, url: str, number: int, end: float, seen: Seen) -> None:
    refused_s = seen.first_refused_s
    body = {"model": "tiny-trained", "prompt": f"client {number}", "max_tokens": TOKENS, "stream": True}
    while time.monotonic() < end:
        began = time.monotonic()
        try:
            async with session.post(f"{url}/v1/completions", json=body | {"ignore_eos": True}) as answer:
                if answer.status == 200:
                    await _read(answer, began, seen)
                    continue
                text = await answer.text()
                refused_s.append(time.monotonic() - began)
                refused_s = seen.refused_s
                seen.statuses[answer.status] += 1
                seen.retry_after.add(answer.headers.get("Retry-After"))
                seen.sentences.add(json.loads(text)["message"])
                await asyncio.sleep(int(answer.headers["Retry-After"]))
        except (aiohttp.ClientError, OSError, LookupError, ValueError) as error:
            seen.problems.append(f"{type(error).__name__}: {error}")
            return


async def _read(answer: aiohttp.ClientResponse, began: float, seen: Seen) -> None:
    first, tokens, is_done, is_bad = None, 0, False, ""
    async for line in answer.content:
        text = line.decode().removeprefix("data: ").strip()
        if text == "[DONE]":
            is_done = True
        elif text.startswith("{"):
            event: dict[str, Any] = json.loads(text)
            if "choices" not in event:
                is_bad = text
                continue
            first = first or time.monotonic() - began
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            is_bad = is_bad or ("" if event["choices"][0].get("finish_reason") in (None, "length") else text)
    if is_bad or not is_done or first is None:
        seen.problems.append(is_bad or f"cut off after {first}")
    else:
        seen.ttft_s.append(first)


def kill_worker(serve: ServeCommand, name: str) -> None:
    os.kill(serve.pid_of(name), signal.SIGKILL)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held_up(seen: Seen) -> None:
    assert not seen.problems, seen.problems[:5]
    assert len(seen.ttft_s) > SLOTS
    assert set(seen.statuses) == {529} and seen.retry_after and None not in seen.retry_after
    assert all(sentence.startswith("the server is overloaded: ") for sentence in seen.sentences), seen.sentences


def test_clients_beyond_the_bounds_are_refused_and_the_others_are_served_whole() -> None:
    with trtx_serve(*BOUNDED) as serve:
        url, seen = serve.wait_ready().url, Seen()
        endless = {"model": "tiny-trained", "prompt": "a", "max_tokens": 8000, "ignore_eos": True}

        async def with_an_endless_request() -> tuple[int, dict[str, Any]]:
            asking = asyncio.ensure_future(asyncio.to_thread(post, url, "/v1/completions", endless))
            await asyncio.gather(asking, load(url, 3 * (SLOTS + QUEUED), 4, seen))
            return asking.result()

        status, answer = asyncio.run(with_an_endless_request())
        held_up(seen)
        assert status == 504 and f"took longer than {TIMEOUT_S} s" in answer["message"]


@pytest.mark.proof  # two minutes of load
def test_400_clients_on_8_slots_also_with_a_worker_that_is_killed(capsys: pytest.CaptureFixture[str]) -> None:
    with trtx_serve(*BOUNDED) as serve:
        url, warm = serve.wait_ready().url, Seen()
        asyncio.run(load(url, 400, 10, warm))  # memory of connections and threads
        before = resident_bytes(serve.pid_of("frontend"))
        steady = Seen()
        asyncio.run(load(url, 400, 60, steady))
        after = resident_bytes(serve.pid_of("frontend"))
        held_up(steady)
        killed = Seen()

        async def with_a_death() -> None:
            loading = asyncio.ensure_future(load(url, 400, 60, killed))
            await asyncio.sleep(10)
            kill_worker(serve, "agg-0")
            await loading

        asyncio.run(with_a_death())
        held_up(killed)
        wait_until(lambda: serve.text().count("agg-0 started") == 2, 60, "the worker is started again")
        with capsys.disabled():
            print(f"\nsteady: {steady.told()}\nmemory of the frontend: {before >> 20} MiB, then {after >> 20} MiB")
            print(f"with kill -9: {killed.told()}")
        assert after - before < 64 << 20
