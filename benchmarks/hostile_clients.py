"""Clients that send only media which must be refused, and the servers in their URLs, for ``hostile_media.py``.

    python benchmarks/hostile_clients.py URL MODEL CLIENTS BODY_MIB

Each input line is a duration in seconds and ``small`` or ``large``. For this duration each client sends one request at
a time; then one line of JSON has the results. BODY_MIB is the size of the large bodies.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import struct
import sys
import time
import zlib
from collections import Counter

import httpx
import numpy as np
from PIL import Image
from safetensors.numpy import save

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n"
_CHUNK = b"10000\r\n" + bytes(1 << 16) + b"\r\n"


def png(width: int, height: int, rows: bytes, text: bytes | None = None) -> bytes:
    """Returns an 8-bit RGB PNG file with ``rows`` as its uncompressed data, valid or not."""

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


LARGE = ("the largest body", "the largest body of escapes")
"""Bodies that Dynamo copies several times before they reach a worker, and twice into it."""


def hostile(port: int, body_mib: int) -> dict[str, list[str]]:
    """Returns the media URLs of each hostile request, by their defect. ``body_mib``: the size of those in ``LARGE``."""
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
    sent[LARGE[0]] = ["data:image/png;base64," + "A" * (body_mib << 20)]
    sent[LARGE[1]] = ["data:image/png;base64," + "%41" * ((body_mib << 20) // 3)]
    sent["17 pictures"] = sent["animated"] * 17
    for path in ("endless", "silent", "drips", "loop", "inwards", "compressed", "headers"):
        sent[path] = [f"http://127.0.0.1:{port}/{path}"]
    return sent


async def evil(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Handles one connection of the server in the hostile URLs."""
    try:
        path = (await reader.readline()).split()[1]
        if path == b"/endless":
            writer.write(_HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
            while True:
                writer.write(_CHUNK)
                await writer.drain()
        elif path == b"/silent":
            await reader.read()  # wait until the client disconnects
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
    except (ConnectionError, IndexError, asyncio.CancelledError):  # cancelled when this process ends
        pass
    finally:
        writer.close()


async def attack(
    http: httpx.AsyncClient,
    bodies: list[tuple[str, bytes]],
    first: int,
    until: float,
    refused: Counter[str],
    others: Counter[str],
) -> None:
    """Sends hostile requests until ``until``.

    ``refused``: counts all responses by status. ``others``: counts the unexpected ones by defect and response.
    """
    for number in itertools.count(first):
        if time.perf_counter() >= until:
            return
        name, body = bodies[number % len(bodies)]
        try:
            answer = await http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
            refused[str(answer.status_code)] += 1
            if answer.status_code // 100 != 4:
                others[f"{name}: {answer.status_code} {answer.text[:300]}"] += 1
        except httpx.WriteError:  # the frontend has answered 413 and stopped reading
            refused["413"] += 1


async def attacker(url: str, model: str, clients: int, body_mib: int) -> None:
    """Runs one attack for each input line, with its duration and kind of bodies, and prints the results as JSON."""
    server = await asyncio.start_server(evil, "127.0.0.1", 0)
    small: list[tuple[str, bytes]] = []
    large: list[tuple[str, bytes]] = []
    for name, urls in hostile(server.sockets[0].getsockname()[1], body_mib).items():
        content = [
            {"type": "text", "text": "what"},
            *({"type": "image_url", "image_url": {"url": one}} for one in urls),
        ]
        asked = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 4}
        (large if name in LARGE else small).append((name, json.dumps(asked).encode()))
    print("ready", flush=True)
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
        for number, line in enumerate(iter(lambda: sys.stdin.readline(), "")):
            seconds, sizes = line.split()
            bodies = [*small, *large] if sizes == "large" else small
            refused: Counter[str] = Counter()
            others: Counter[str] = Counter()
            until = time.perf_counter() + float(seconds)
            step = max(1, len(bodies) // clients)
            await asyncio.gather(
                *(attack(http, bodies, number * 5 + step * one, until, refused, others) for one in range(clients))
            )
            print(json.dumps([refused, others]), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("clients", type=int)
    parser.add_argument("body_mib", type=int, help="of the large bodies")
    asked = parser.parse_args()
    asyncio.run(attacker(asked.url, asked.model, asked.clients, asked.body_mib))
