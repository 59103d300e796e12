"""Servers that are measured beside each other: how each is started, seen to answer, and ended.

A peer lies in a folder of its own, with what it needs, on the PYTHONPATH of its own process alone. Each has the
defaults of its maker, among them chunked prefill and prefix caching; its weights are drawn in the shape of a directory,
whose tokenizer it reads too.
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
END_S = 60.0  # a server that is told to end, and the memory that it held
FREED_MIB = 1024  # more than before the server, with room for what a driver keeps


class Failed(Exception):
    """One sentence, and the end of a log: why a server or a load has no figures."""


@dataclass(frozen=True, slots=True)
class Peer:
    """``words`` of its command behind the interpreter's, up to the directory of the model."""

    package: str
    words: tuple[str, ...]
    environment: Mapping[str, str]


PEERS = {
    "vllm": Peer("vllm", ("-m", "vllm.entrypoints.cli.main", "serve"), {"VLLM_NO_USAGE_STATS": "1"}),
    "sglang": Peer("sglang", ("-m", "sglang.launch_server", "--model-path"), {}),
}


@dataclass(frozen=True, slots=True)
class Server:
    """How one is started, and in which directory."""

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
    """``vllm`` of ``vllm`` and of ``vllm-0.24``: two versions of one are two peers."""
    return name.partition("-")[0]


def peers_of(asked: list[str]) -> dict[str, Path]:
    """Folders by name of ``NAME=DIR``. Raises ValueError."""
    found: dict[str, Path] = {}
    for text in asked:
        name, _, folder = text.partition("=")
        if kind_of(name) not in PEERS or not folder:
            raise ValueError(f"--peer {text} is not NAME=DIR; NAME is one of {', '.join(PEERS)}, or such as vllm-0.24")
        if name in found:
            raise ValueError(f"--peer names {name} twice; give two versions names of their own, such as {name}-old")
        package = PEERS[kind_of(name)].package
        if not (Path(folder) / package).is_dir():
            raise ValueError(f"--peer {text}: {folder} has no package {package}; expected the folder that it lies in")
        found[name] = Path(folder).resolve()
    return found


def version_in(folder: Path, package: str) -> str:
    """Of the package in the folder, "–" where nothing there tells it."""
    for found in importlib.metadata.distributions(path=[str(folder)]):
        if found.name.lower() == package:
            return found.version
    return "–"


def trtx_server(model: str, settings: list[str], port: int, out: Path) -> Server:
    words = [word for one in settings for word in ("--set", one)]
    command = [sys.executable, "-m", "trtx", "serve", "--model", model, "--mode", "agg",
               "--port", str(port), "-o", str(out), *words]  # fmt: skip
    return Server("trtx", importlib.metadata.version("trtx"), command, dict(os.environ), Path.cwd(), port)


def peer_server(name: str, folder: Path, model: Path, port: int, out: Path) -> Server:
    """Without a network it looks for names of the hub and reports usage for minutes unless told not to; a kernel that
    it compiles at the start takes ninja from beside the interpreter."""
    peer = PEERS[kind_of(name)]
    command = [sys.executable, "-P", *peer.words, str(model), "--load-format", "dummy",
               "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "peer"]  # fmt: skip
    environment = os.environ | peer.environment | {
        "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }  # fmt: skip
    return Server(name, version_in(folder, peer.package), command, environment, out, port)


@contextlib.contextmanager
def served(server: Server, log: Path, left_s: Callable[[], float], problems: list[str]) -> Iterator[tuple[str, float]]:
    """(name of the model that it serves, seconds from its start to its first answer). Raises Failed."""
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
    """The model's name, once a request for one token has gone through."""
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
    """The server ends its own processes; what is left of its session is killed after it."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def gpu_memory_mib() -> int | None:
    """In use on the GPUs that this process sees; None where nobody can tell."""
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    asked += ["-i", visible] if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) else []
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout
        return sum(int(line) for line in told.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def until_free(before: int) -> int | None:
    """None once no more is in use than ``before``, within END_S; else what is, in MiB."""
    deadline = time.monotonic() + END_S
    while (used := gpu_memory_mib()) is not None and used > before + FREED_MIB:
        if time.monotonic() > deadline:
            return used
        time.sleep(0.5)
    return None


def end_of(log: Path) -> str:
    text = log.read_text(errors="replace")[-2000:].strip() if log.exists() else ""
    return f"the end of {log}:\n{text}"
