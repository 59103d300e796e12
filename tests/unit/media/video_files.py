"""Video files made here, by the encoders that PyAV brings; and what transformers' video processors compute."""

from __future__ import annotations

import ast
import io
import math
import struct
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import torch
import transformers
from av.stream import Disposition
from transformers import Qwen3VLProcessor
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import SizeDict
from transformers.video_utils import VideoMetadata

Array = np.ndarray[Any, Any]
av.logging.set_level(None)
_QUIET = {"libx265": {"x265-params": "log-level=none"}}


def drawn(frames: int, width: int = 64, height: int = 48) -> list[Array]:
    """Flat colours, so that encoders change them little, another in each frame; the left half brighter in red."""
    made = []
    for index in range(frames):
        picture = np.full((height, width, 3), 20 + index * 200 // max(frames, 2), np.uint8)
        picture[:, : width // 2, 0] = 230
        made.append(picture)
    return made


def saved(
    pictures: list[Array],
    *,
    codec: str = "libx264",
    container: str = "mp4",
    rate: int | Fraction = 10,
    rotation: int = 0,
    sound_s: float = 0.0,
    movflags: str = "",
    times_ms: list[int] | None = None,
) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container, container_options={"movflags": movflags} if movflags else {}) as output:
        stream: Any = output.add_stream(codec, rate=rate, options=_QUIET.get(codec, {}))
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt = "bgr0" if codec == "ffv1" else "yuv420p"
        if rotation:
            stream.set_display_rotation(rotation)
        silence: Any = output.add_stream("aac" if container == "mp4" else "libopus", rate=48000) if sound_s else None
        if times_ms:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number, picture in enumerate(pictures):
            shown = av.VideoFrame.from_ndarray(picture, format="rgb24")
            if times_ms:
                shown.pts, shown.time_base = times_ms[number], Fraction(1, 1000)
            output.mux(stream.encode(shown))
        output.mux(stream.encode())
        for at in range(0, int(sound_s * 48000), 960):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 960), np.float32), format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 48000, at
            output.mux(silence.encode(frame))
        if silence is not None:
            output.mux(silence.encode())
    return file.getvalue()


def without_last_frame(file: bytes) -> bytes:
    """What there is before its packet."""
    with av.open(io.BytesIO(file)) as container:
        return file[: max(packet.pos for packet in container.demux(video=0) if packet.size)]


def damaged(file: bytes, frame: int) -> bytes:
    """The last quarter of a packet's bytes is others."""
    with av.open(io.BytesIO(file)) as container:
        packet = [packet for packet in container.demux(video=0) if packet.size][frame]
        end = packet.pos + packet.size
        count = packet.size // 4
    return file[: end - count] + bytes(one ^ 0x5A for one in file[end - count : end]) + file[end:]


def shown_by(file: bytes, *matrix: float) -> bytes:
    """An MP4 of one track whose display matrix starts ``a, b, c, d``: a picture's right and down, x and y of each."""
    a, b, c, d = (round(one * 65536) for one in matrix)
    at = file.index(b"tkhd") + 44
    return file[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + file[at + 36 :]


def sound(cover: Array | None = None) -> bytes:
    """An MP4 without video; ``cover``: the picture of a record."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream: Any = output.add_stream("aac", rate=8000)
        if cover is not None:
            art: Any = output.add_stream("mjpeg", rate=1)
            art.height, art.width, art.pix_fmt = *cover.shape[:2], "yuvj420p"
            art.disposition = Disposition.attached_pic
            output.mux(art.encode(av.VideoFrame.from_ndarray(cover, format="rgb24")))
            output.mux(art.encode())
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


def decoded(file: bytes) -> list[Array]:
    with av.open(io.BytesIO(file)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def theirs(module: str) -> Any:
    """Of one of transformers' video processors, whose modules import a torchvision that does not load beside a CPU's
    torch: ``smart_resize``, the methods ``sample_frames`` and ``patchify``, and the class's own ``size``."""
    path = Path(transformers.__file__).parent / "models" / module
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "size" and "size" not in found:
            found["size"] = eval(compile(ast.Expression(node.value), str(path), "eval"))
        wanted = ("smart_resize", "sample_frames", "patchify")
        if isinstance(node, ast.FunctionDef) and node.name in wanted:
            node.returns, node.decorator_list = None, []
            for argument in (*node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
            names: dict[str, Any] = {"math": math, "torch": torch, "np": np}
            exec(compile(ast.fix_missing_locations(ast.Module([node], [])), str(path), "exec"), names)
            found[node.name] = names[node.name]
    return SimpleNamespace(**found)


QWEN_2 = theirs("qwen2_vl/video_processing_qwen2_vl.py")
QWEN_3 = theirs("qwen3_vl/video_processing_qwen3_vl.py")


def timestamps(indices: list[int], fps: float) -> list[float]:
    """When each step of a Qwen3-VL video is."""
    found: list[float] = Qwen3VLProcessor._calculate_timestamps(None, list(indices), fps, 2)
    return found


def prepared(
    processor: Any, pictures: list[Array], fps: float, *, is_third: bool, size: Any, most: int
) -> tuple[torch.Tensor, torch.Tensor, VideoMetadata]:
    """Patches, grid and the frames taken, as transformers' video processor of Qwen2.5-VL or Qwen3-VL (``is_third``)
    makes them. ``processor``: an image processor on Pillow, whose resizing, mean and deviation these are; ``size``: the
    limits of pixels; ``most``: frames."""
    videos = QWEN_3 if is_third else QWEN_2
    metadata = VideoMetadata(total_num_frames=len(pictures), fps=fps)
    asked = SimpleNamespace(num_frames=None, fps=2.0, temporal_patch_size=2, min_frames=4, max_frames=most)
    is_one = len(pictures) == 1  # of which transformers' Qwen2.5-VL takes none, and divides by that
    metadata.frames_indices = [0] if is_one else [int(one) for one in videos.sample_frames(asked, metadata)]
    taken = [pictures[index] for index in metadata.frames_indices]
    height, width = taken[0].shape[:2]
    shape = (len(taken), height, width, processor.temporal_patch_size) if is_third else (height, width)
    factor = processor.patch_size * processor.merge_size
    high, wide = videos.smart_resize(*shape, factor, size["shortest_edge"], size["longest_edge"])

    def made(picture: Array) -> Array:
        asked_size = SizeDict(height=high, width=wide)
        resized = PilBackend.resize(processor, picture.transpose(2, 0, 1), asked_size, processor.resample)
        rescaled = processor.rescale(resized, processor.rescale_factor)
        found: Array = processor.normalize(rescaled, processor.image_mean, processor.image_std)
        return found

    batch = torch.tensor(np.stack([made(one) for one in taken]), dtype=torch.float32)[None]
    patches, *grid = videos.patchify(
        None, batch, processor.patch_size, processor.merge_size, processor.temporal_patch_size
    )
    return patches[0], torch.tensor([grid]), metadata
