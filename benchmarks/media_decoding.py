"""Measures the cost of images in a worker before they reach its encoder.

(a) The peak memory of a decoding process above its initial memory, for images of 50 million pixels, by format.
(b) Milliseconds to decode and prepare an image, and images/s with one and two processes, 16 images at a time.
(c) The longest stall of the event loop while a data: URL of 23 MiB is decoded, and for one call of Python's decoder.

    python benchmarks/media_decoding.py [--only memory|speed|stall]

(b) uses a Qwen2-VL image processor of at most 1280 x 28 x 28 pixels. Numbers are medians of rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from trtx.ipc.shared_tensor import remove_shared
from trtx.media import Blob, MediaLimits, PicturePool, fetch

SIDE = 7071  # the side of a square image of 50 million pixels
LIMITS = MediaLimits(decode_memory_bytes=8 << 30, decode_timeout_s=300, max_media_bytes=1 << 30)


def saved(picture: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def turned(mode: str) -> Callable[[], bytes]:
    exif = Image.Exif()
    exif[0x0112] = 6
    return lambda: saved(Image.new(mode, (SIDE, SIDE)), "PNG", compress_level=1, exif=exif.tobytes())


LARGE: dict[str, Callable[[], bytes]] = {
    "RGB PNG": lambda: saved(Image.new("RGB", (SIDE, SIDE)), "PNG", compress_level=1),
    "RGBA PNG": lambda: saved(Image.new("RGBA", (SIDE, SIDE)), "PNG", compress_level=1),
    "RGBA PNG, turned": turned("RGBA"),
    "gray and alpha PNG": lambda: saved(Image.new("LA", (SIDE, SIDE)), "PNG", compress_level=1),
    "16-bit gray PNG": lambda: saved(Image.fromarray(np.zeros((SIDE, SIDE), np.uint16)), "PNG", compress_level=1),
    "CMYK JPEG": lambda: saved(Image.new("CMYK", (SIDE, SIDE)), "JPEG"),
    "lossless WEBP": lambda: saved(Image.new("RGBA", (SIDE, SIDE)), "WEBP", lossless=True, method=0),
}


def model(directory: str) -> Path:
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 4 * 28 * 28,
        "max_pixels": 1280 * 28 * 28,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    (Path(directory) / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    return Path(directory)


def status(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) << 10


async def memory() -> None:
    for kind, make in LARGE.items():
        with tempfile.TemporaryDirectory() as directory:
            one = LIMITS.model_copy(update={"decode_processes": 1})
            async with PicturePool(model(directory), one, directory=Path(directory)) as pool:
                (pid,) = pool.pids
                mapped = status(pid, "VmSize")
                remove_shared((await pool.prepare(Blob(make(), kind))).pixels)
                print(f"{kind:20} {(status(pid, 'VmPeak') - mapped) / (1 << 20):6.0f} MiB")


async def speed() -> None:
    noise = np.random.default_rng(1).integers(0, 256, (48, 64, 3)).astype(np.uint8)
    for width, height in ((512, 512), (1024, 1024), (2000, 1500)):
        blob = Blob(saved(Image.fromarray(noise).resize((width, height)), "JPEG"), "picture")
        for processes in (1, 2):
            with tempfile.TemporaryDirectory() as directory:
                limits = LIMITS.model_copy(update={"decode_processes": processes})
                async with PicturePool(model(directory), limits, directory=Path(directory)) as pool:

                    async def one(pool: PicturePool = pool, blob: Blob = blob) -> None:
                        remove_shared((await pool.prepare(blob)).pixels)

                    await one()
                    alone, together = [], []
                    for _ in range(5):
                        begun = time.perf_counter()
                        await one()
                        alone.append(time.perf_counter() - begun)
                        begun = time.perf_counter()
                        await asyncio.gather(*(one() for _ in range(16)))
                        together.append(time.perf_counter() - begun)
            rate = 16 / statistics.median(together)
            print(
                f"{width}x{height} JPEG, {processes} processes: {statistics.median(alone) * 1e3:6.1f} ms, {rate:5.1f}/s"
            )


async def stall() -> None:
    text = base64.b64encode(np.random.default_rng(1).bytes(23 << 20)).decode()

    async def longest_s(work: Callable[[], object]) -> float:
        longest, done = 0.0, False

        async def watch() -> None:
            nonlocal longest
            while not done:
                begun = time.perf_counter()
                await asyncio.sleep(0.001)
                longest = max(longest, time.perf_counter() - begun - 0.001)

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0.01)
        result = work()
        if asyncio.iscoroutine(result):
            await result
        done = True
        await watching
        return longest

    ours = [await longest_s(lambda: fetch(f"data:;base64,{text}", LIMITS)) for _ in range(5)]
    thread = [await longest_s(lambda: asyncio.to_thread(base64.b64decode, text)) for _ in range(5)]
    print(
        f"fetch: {statistics.median(ours) * 1e3:.1f} ms; one call in a thread: {statistics.median(thread) * 1e3:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["memory", "speed", "stall"])
    only = parser.parse_args().only
    for name, part in (("memory", memory), ("speed", speed), ("stall", stall)):
        if only in (None, name):
            asyncio.run(part())


if __name__ == "__main__":
    main()
