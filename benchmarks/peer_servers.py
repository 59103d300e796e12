"""Starts, probes and ends the servers that are compared: trtx and its peers.

Each peer and its dependencies are in one folder, which is on the PYTHONPATH of that peer's process only. Peers run with
their own defaults, including chunked prefill and prefix caching. They generate random weights for the config.json of a
directory, and read its tokenizer.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

READY_S = 420.0  # vLLM compiles and captures for minutes
END_S = 60.0  # for a server to end, and for its GPU memory to be freed
FREED_MIB = 1024  # tolerated increase over the time before the server, for the driver


class Failed(Exception):
    """Why a server or a load has no results: one sentence and the end of a log."""


@dataclass(frozen=True, slots=True)
class Peer:
    """``words``: the command after the interpreter, up to the model directory. ``tp``: its option of that name."""

    package: str
    words: tuple[str, ...]
    tp: str
    environment: Mapping[str, str]


PEERS = {
    "vllm": Peer("vllm", ("-m", "vllm.entrypoints.cli.main", "serve"), "--tensor-parallel-size",
                 {"VLLM_NO_USAGE_STATS": "1"}),
    "sglang": Peer("sglang", ("-m", "sglang.launch_server", "--model-path"), "--tp-size", {}),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Server:
    """How a server is started."""

    name: str
    version: str
    command: list[str]
    environment: dict[str, str]
    directory: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def kind_of(name: str) -> str:
    """Returns ``vllm`` for ``vllm`` and for ``vllm-0.24``: two versions of one server are two peers."""
    return name.partition("-")[0]


def peers_of(asked: list[str]) -> dict[str, Path]:
    """Returns the folder of each peer by name, from ``NAME=DIR`` texts. Raises ValueError."""
    found: dict[str, Path] = {}
    for text in asked:
        name, _, folder = text.partition("=")
        if kind_of(name) not in PEERS or not folder:
            raise ValueError(f"--peer {text} is not NAME=DIR; NAME is one of {', '.join(PEERS)}, or such as vllm-0.24")
        if name in found:
            raise ValueError(f"--peer names {name} twice; give two versions names of their own, such as {name}-old")
        package = PEERS[kind_of(name)].package
        if not (Path(folder) / package).is_dir():
            raise ValueError(f"--peer {text}: {folder} has no package {package}; expected the folder that contains it")
        found[name] = Path(folder).resolve()
    return found


def version_in(folder: Path, package: str) -> str:
    """Returns the version of the package in the folder, "–" if it is unknown."""
    for found in importlib.metadata.distributions(path=[str(folder)]):
        if found.name.lower() == package:
            return found.version
    return "–"


def trtx_server(model: str, settings: list[str], port: int, out: Path, *, tp: int) -> Server:
    """Returns the server of trtx. ``tp``: GPUs of its worker, 1 for its default."""
    words = [word for one in settings for word in ("--set", one)] + (["--tp", str(tp)] if tp > 1 else [])
    command = [sys.executable, "-m", "trtx", "serve", "--model", model, "--mode", "agg",
               "--port", str(port), "-o", str(out), *words]  # fmt: skip
    return Server("trtx", importlib.metadata.version("trtx"), command, dict(os.environ), Path.cwd(), port)


def peer_server(name: str, folder: Path, model: Path, port: int, out: Path, *, tp: int, more: list[str]) -> Server:
    """Returns the server of a peer on ``tp`` GPUs, with ``more`` words at the end of its command.

    Without a network, a peer would wait minutes for the hub and for usage reports, which variables turn off. To compile
    kernels at start it needs ninja, which is next to the interpreter.
    """
    peer = PEERS[kind_of(name)]
    command = [sys.executable, "-P", *peer.words, str(model), "--load-format", "dummy",
               "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "peer",
               *((peer.tp, str(tp)) if tp > 1 else ()), *more]  # fmt: skip
    environment = os.environ | peer.environment | {
        "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }  # fmt: skip
    return Server(name, version_in(folder, peer.package), command, environment, out, port)


@contextlib.contextmanager
def served(server: Server, log: Path, left_s: Callable[[], float], problems: list[str]) -> Iterator[tuple[str, float]]:
    """Yields (served model name, seconds from start to first answer). Raises Failed."""
    before = gpu_memory_mib()
    began = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            server.command,
            env=server.environment,
            cwd=server.directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        while (model := answering(server.url)) is None:
            waited = time.monotonic() - began
            if process.poll() is not None:
                raise Failed(f"{server.name} ended with {process.returncode} after {waited:.0f} s; {end_of(log)}")
            if waited > READY_S or left_s() <= 0:
                raise Failed(f"{server.name} gave no answer within {waited:.0f} s; {end_of(log)}")
            time.sleep(0.1)
        yield model, time.monotonic() - began
    finally:
        end(process)
        if before is not None and (still := until_free(before)) is not None:
            problems.append(
                f"{still - before} MiB of the GPU were still held {END_S:g} s after {server.name} had ended"
            )


def answering(url: str) -> str | None:
    """Returns the served model name if a request for one token succeeds, else None."""
    try:
        models = httpx.get(f"{url}/v1/models", timeout=2, trust_env=False).json()["data"]
        if not models:
            return None
        name = str(models[0]["id"])
        asked = {"model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=120, trust_env=False)
        return name if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends the server, which ends its own processes; kills what is left of its session."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def gpu_memory_mib() -> int | None:
    """Returns the memory in use on the visible GPUs; None if it is unknown."""
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    asked += ["-i", visible] if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) else []
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout
        return sum(int(line) for line in told.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def until_free(before: int) -> int | None:
    """Waits up to END_S until memory use is back to ``before``. Returns None, or the MiB that are still in use."""
    deadline = time.monotonic() + END_S
    while (used := gpu_memory_mib()) is not None and used > before + FREED_MIB:
        if time.monotonic() > deadline:
            return used
        time.sleep(0.5)
    return None


def end_of(log: Path) -> str:
    text = log.read_text(errors="replace")[-2000:].strip() if log.exists() else ""
    return f"the end of {log}:\n{text}"
