"""Clients of a served topology for tests: a ``trtx serve`` in a process of its own, and streams that note their end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from processes import HTTP, TRTX

from trtx.launch.processes import members
from trtx.topology import Plan

PACED = ("--engine", "paced", "--set", "paced_itl_ms=20", "--set", "paced_ttft_ms=20")


def wait_until(holds: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


@dataclass
class ServeCommand:
    """A running ``trtx serve``, its plan once it is ready, and what it printed."""

    process: subprocess.Popen[bytes]
    output: Path
    run_parent: Path

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_ready(self, seconds: float = 60) -> Plan:
        def ready() -> bool:
            assert self.process.poll() is None, "trtx serve ended early"
            return "Ready: " in self.text()

        try:
            wait_until(ready, seconds, "ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()}") from None  # what it has printed by now
        return self.plan()

    def plan(self) -> Plan:
        (path,) = self.run_parent.glob("*/plan.json")
        return Plan.from_json(json.loads(path.read_text()))

    def wait(self, seconds: float) -> int:
        return self.process.wait(timeout=seconds)

    def pid_of(self, name: str) -> int:
        """The process's pid as last printed."""
        return int(re.findall(rf"{name} started, pid (\d+)", self.text())[-1])


@contextlib.contextmanager
def trtx_serve(*arguments: str) -> Iterator[ServeCommand]:
    """Runs ``trtx serve`` in its own session; afterwards nothing of it is left, whatever the test did to it."""
    with tempfile.TemporaryDirectory(prefix="trtx-test-") as directory:
        output = Path(directory) / "output.txt"
        runs = Path(directory) / "runs"
        if "--port" not in arguments:
            arguments = (*arguments, "--port", "0")
        command = [*TRTX, "serve", "-o", str(runs), *arguments]
        with output.open("ab") as stream:  # appended to, as a log is: a test may write there too
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        serve = ServeCommand(process, output, runs)
        try:
            yield serve
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=45)
                if process.poll() is None:
                    process.kill()  # its guardian ends the rest
                    process.wait()
            for path in runs.glob("*/plan.json"):
                plan = Plan.from_json(json.loads(path.read_text()))
                wait_until(lambda plan=plan: nothing_left(plan), 30, "every process gone")  # type: ignore[misc]


def nothing_left(plan: Plan) -> bool:
    """No process and no discovery record of the topology."""
    return not members(plan.marker, ()) and not plan.scratch_dir.exists()


def post(url: str, path: str, body: dict[str, Any], timeout_s: float = 30) -> tuple[int, dict[str, Any]]:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text else {}
    finally:
        connection.close()


def open_streams(url: str) -> int:
    """Requests that a frontend has taken and not answered to the end."""
    text = HTTP.get(f"{url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("dynamo_frontend_inflight_requests{")]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines)


@dataclass
class Stream:
    """One streamed completion: when it began, how many chunks came, and how it ended."""

    began: float
    ended: float = 0.0
    chunks: int = 0
    problem: str | None = None
    finish_reason: str | None = None

    @property
    def is_good(self) -> bool:
        return self.problem is None and self.finish_reason is not None


def stream_once(url: str, model: str, prompt: str, max_tokens: int) -> Stream:
    stream = Stream(time.monotonic())
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            stream.problem = f"HTTP {response.status} {response.read()[:200]!r}"
            return stream
        for line in response:
            data = line.strip().removeprefix(b"data: ")
            if not line.startswith(b"data: ") or data == b"[DONE]":
                if line.startswith((b"event: error", b": ")):
                    stream.problem = line.decode()
                continue
            event = json.loads(data)
            if "choices" not in event:
                stream.problem = data.decode()[:300]
                continue
            stream.chunks += 1
            for choice in event["choices"]:
                stream.finish_reason = choice.get("finish_reason") or stream.finish_reason
    except (OSError, http.client.HTTPException, ValueError) as error:
        stream.problem = f"{type(error).__name__}: {error}"
    finally:
        stream.ended = time.monotonic()
        connection.close()
    return stream


@dataclass
class Load:
    """``concurrency`` closed-loop clients that stream until told to stop; every stream is kept."""

    url: str
    model: str
    concurrency: int
    max_tokens: int
    streams: list[Stream] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Load:
        for number in range(self.concurrency):
            thread = threading.Thread(target=self._client, args=(number,), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=60)

    def _client(self, number: int) -> None:
        count = 0
        while not self._stop.is_set():
            stream = stream_once(self.url, self.model, f"client {number} request {count}", self.max_tokens)
            self.streams.append(stream)
            count += 1
            if not stream.is_good:
                time.sleep(0.05)  # a refused client does not spin
