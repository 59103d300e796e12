"""A text stream beside hostile media: its ITL, and the memory of the processes that serve it.

    python benchmarks/hostile_media.py [--mode disagg] [--encode 1] [--rounds 5] [--seconds 20] [--clients 4]

Serves the model as `trtx serve` does, and streams text from it, one answer after the other. Every other stretch of
time has clients beside it that send nothing but media that are refused: endless, silent and dripping servers, redirects
in circles and inwards, files cut short, bombs of pixels and of bytes, animated ones, none at all. The stretches
alternate, so that whatever else the machine does meets both. ITL is between arrivals of chunks at the client. The
hostile clients and their servers are a process of their own, on the same machine. Exit 1 when a text stream failed, or
one of the media was not refused.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import os
import struct
import sys
import tempfile
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import psutil
from PIL import Image
from safetensors.numpy import save

from trtx.config import TopologySpec
from trtx.config.media import MediaLimits
from trtx.launch import ServedTopology, prepare, serve

LIMITS = MediaLimits(allow_http_media=True, allow_private_media=True, media_timeout_s=3, media_idle_s=1)
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n"
_CHUNK = b"10000\r\n" + bytes(1 << 16) + b"\r\n"


@dataclass(slots=True)
class Stretch:
    """What was seen with, or without, hostile clients."""

    itl_ms: list[float] = field(default_factory=list)
    answers: int = 0
    failed: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)  # requests with hostile media, by status
    rss: dict[str, int] = field(default_factory=dict)  # most bytes, by what the process is


# --- media ---


def png(width: int, height: int, rows: bytes, text: bytes | None = None) -> bytes:
    """Of RGB in 8 bits, whatever ``rows`` are."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    if text is not None:
        header += chunk(b"zTXt", b"k\0\0" + zlib.compress(text, 9))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


def saved(picture: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


LARGE = ("40 MB", "40 MB of escapes")
"""Bodies that Dynamo copies several times before a worker sees them, and twice into it."""


def hostile(port: int) -> dict[str, list[str]]:
    """Addresses of one request each, by what is wrong with them."""
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 256, (1200, 1600, 3), np.uint8))
    photo, frames = saved(noise, "JPEG"), [Image.new("RGB", (64, 64), one) for one in ("red", "blue")]
    files = {
        "cut short": photo[:-1000],
        "59 million pixels, of which the header tells": png(7700, 7700, b"\0"),
        "pixels of the header that are not there": png(7000, 7000, b"\0"),
        "48 million pixels, cut short": saved(Image.new("RGB", (6900, 6900)), "PNG", compress_level=9)[:-100],
        "animated": saved(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "no picture": b"<html>" + bytes(1 << 20),
        "a text of 200 MB": png(4, 4, bytes(4 * 13), text=bytes(200 << 20)),
    }
    rows = save({"embedding": np.full((25, 128), np.nan, np.float32)})
    sent = {name: [f"data:image/png;base64,{base64.b64encode(file).decode()}"] for name, file in files.items()}
    sent["not finite"] = [f"data:application/x-safetensors;base64,{base64.b64encode(rows).decode()}"]
    sent["40 MB"] = ["data:image/png;base64," + "A" * (40 << 20)]
    sent["40 MB of escapes"] = ["data:image/png;base64," + "%41" * (40 << 18)]
    sent["17 pictures"] = sent["animated"] * 17
    for path in ("endless", "silent", "drips", "loop", "inwards", "compressed", "headers"):
        sent[path] = [f"http://127.0.0.1:{port}/{path}"]
    return sent


async def evil(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection of the server that ``hostile`` names."""
    try:
        path = (await reader.readline()).split()[1]
        if path == b"/endless":
            writer.write(_HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
            while True:
                writer.write(_CHUNK)
                await writer.drain()
        elif path == b"/silent":
            await reader.read()  # until the client has gone
        elif path == b"/drips":
            writer.write(_HEAD + b"Content-Length: 100000\r\n\r\n")
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.2)
        elif path == b"/headers":
            writer.write(_HEAD)
            while True:
                writer.write(b"X-More: of them\r\n" * 1000)
                await writer.drain()
        elif path == b"/compressed":
            body = zlib.compress(bytes(32 << 20), 9)
            writer.write(_HEAD + b"Content-Encoding: deflate\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        else:
            place = b"/loop" if path == b"/loop" else b"http://169.254.169.254/latest/meta-data"
            writer.write(b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: " + place + b"\r\n\r\n")
        await writer.drain()
    except (ConnectionError, IndexError):
        pass
    finally:
        writer.close()


# --- clients ---


async def stream(http: httpx.AsyncClient, model: str, until: float, seen: Stretch, tokens: int) -> None:
    """Text, one answer after the other."""
    for number in itertools.count():
        if time.perf_counter() >= until:
            return
        content = f"tell me of {number} and of {seen.answers}"
        body = {"model": model, "messages": [{"role": "user", "content": content}], "stream": True}
        body |= {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        try:
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                last: float | None = None
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = time.perf_counter()
                    if '"error"' in line:
                        raise httpx.HTTPError(line[:200])
                    if last is not None:
                        seen.itl_ms.append((now - last) * 1e3)
                    last = now
            seen.answers += 1
        except httpx.HTTPError as error:
            seen.failed.append(f"{type(error).__name__}: {error}")


async def attack(http: httpx.AsyncClient, bodies: list[bytes], first: int, until: float, refused: Counter[str]) -> None:
    """``refused``: by status; what was not refused, too."""
    for number in itertools.count(first):
        if time.perf_counter() >= until:
            return
        body = bodies[number % len(bodies)]
        try:
            answer = await http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
            refused[str(answer.status_code)] += 1
        except httpx.WriteError:  # the frontend has said 413, and reads no more
            refused["413"] += 1


async def attacker(url: str, model: str, clients: int) -> None:
    """A process of its own: attacks for as many seconds, and with such bodies, as each line of its input says, and
    answers in JSON."""
    server = await asyncio.start_server(evil, "127.0.0.1", 0)
    small: list[bytes] = []
    large: list[bytes] = []
    for name, urls in hostile(server.sockets[0].getsockname()[1]).items():
        content = [
            {"type": "text", "text": "what"},
            *({"type": "image_url", "image_url": {"url": one}} for one in urls),
        ]
        asked = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 4}
        (large if name in LARGE else small).append(json.dumps(asked).encode())
    print("ready", flush=True)
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
        for number, line in enumerate(iter(lambda: sys.stdin.readline(), "")):
            seconds, sizes = line.split()
            bodies = [*small, *large] if sizes == "large" else small
            refused: Counter[str] = Counter()
            until = time.perf_counter() + float(seconds)
            step = max(1, len(bodies) // clients)
            await asyncio.gather(
                *(attack(http, bodies, number * 5 + step * one, until, refused) for one in range(clients))
            )
            print(json.dumps(refused), flush=True)


async def watch_memory(topology: ServedTopology, until: float, seen: Stretch) -> None:
    """Most that each of the topology's processes has; decoders of one worker together."""
    while time.perf_counter() < until:
        now: Counter[str] = Counter()
        for slot in topology.slots:
            if slot.child is None:
                continue
            try:
                parent = psutil.Process(slot.child.pid)
                for process in (parent, *parent.children(recursive=True)):
                    command = " ".join(process.cmdline())
                    what = "decoders" if "media.decoder" in command else "encoder" if "vision" in command else "engine"
                    name = slot.spec.name if process.pid == parent.pid else f"{slot.spec.name}, {what}"
                    now[name] += process.memory_info().rss
            except psutil.Error:
                continue
        for name, rss in now.items():
            seen.rss[name] = max(rss, seen.rss.get(name, 0))
        await asyncio.sleep(0.2)


async def measure(topology: ServedTopology, arguments: argparse.Namespace) -> dict[str, Stretch]:
    command = [__file__, "--attack", topology.url, "--model", topology.model, "--clients", str(arguments.clients)]
    hostile = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert hostile.stdin is not None and hostile.stdout is not None
    assert await hostile.stdout.readline() == b"ready\n"
    kinds = {"quiet": None, "beside hostile media": "small", "beside these and bodies of 40 MB": "large"}
    stretches = {name: Stretch() for name in kinds}
    async with httpx.AsyncClient(base_url=topology.url, timeout=120, trust_env=False) as http:
        await stream(http, topology.model, time.perf_counter() + 3, Stretch(), arguments.tokens)
        for number in range(arguments.rounds):
            for name, seen in [*stretches.items()][:: 1 if number % 2 == 0 else -1]:
                until = time.perf_counter() + arguments.seconds
                if sizes := kinds[name]:
                    hostile.stdin.write(f"{arguments.seconds} {sizes}\n".encode())
                await asyncio.gather(
                    stream(http, topology.model, until, seen, arguments.tokens), watch_memory(topology, until, seen)
                )
                if sizes:
                    seen.refused.update(json.loads(await hostile.stdout.readline()))
    hostile.stdin.close()
    await hostile.wait()
    return stretches


def table(stretches: dict[str, Stretch]) -> None:
    print("| | answers | tokens | ITL p50 ms | p90 | p99 | longest |\n|---|--:|--:|--:|--:|--:|--:|")
    for name, seen in stretches.items():
        p50, p90, p99 = np.percentile(seen.itl_ms, (50, 90, 99))
        print(
            f"| {name} | {seen.answers} | {len(seen.itl_ms)} | {p50:.2f} | {p90:.2f} | {p99:.2f} | "
            f"{max(seen.itl_ms):.1f} |"
        )
    print(f"\n| most RSS, MiB | {' | '.join(stretches)} |\n|---|{'--:|' * len(stretches)}")
    for process in sorted({process for seen in stretches.values() for process in seen.rss}):
        print(f"| {process} | {' | '.join(str(seen.rss.get(process, 0) >> 20) for seen in stretches.values())} |")
    print()
    for name, seen in stretches.items():
        said = ", ".join(f"{count} x {status}" for status, count in sorted(seen.refused.items()))
        print(f"{name}: {len(seen.failed)} text streams failed; hostile requests by status: {said or 'none'}")
        for failure in seen.failed[:3]:
            print(f"  {failure}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attack", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="synthetic:tiny-vl")
    parser.add_argument("--mode", choices=("agg", "disagg"), default="agg")
    parser.add_argument("--encode", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5, help="of a stretch of each kind")
    parser.add_argument("--seconds", type=float, default=20, help="of a stretch")
    parser.add_argument("--clients", type=int, default=4, help="that send hostile media, one request at a time each")
    parser.add_argument("--tokens", type=int, default=128, help="of a streamed answer")
    arguments = parser.parse_args()
    if arguments.attack is not None:
        asyncio.run(attacker(arguments.attack, arguments.model, arguments.clients))
        return 0
    spec = TopologySpec(
        model=arguments.model, engine="torch", mode=arguments.mode, encode=arguments.encode, media=LIMITS, port=0
    )
    print(
        f"# {' '.join(sys.argv)}; load average before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True
    )
    plan = prepare(spec, run_dir=Path(tempfile.mkdtemp(prefix="trtx-hostile-media-")))
    with serve(plan, on_event=lambda event: print(f"- {event.message}", file=sys.stderr, flush=True)) as topology:
        stretches = asyncio.run(measure(topology, arguments))
        restarts = [(one.name, one.exit) for one in topology.restarts]
    table(stretches)
    print(f"restarts: {restarts}")
    are_refused = all(status.startswith("4") for seen in stretches.values() for status in seen.refused)
    has_failed = any(seen.failed for seen in stretches.values())
    return 0 if are_refused and not has_failed and not restarts else 1


if __name__ == "__main__":
    sys.exit(main())
