"""Videos in the pool: frames as the file has them, prepared as transformers prepares them; and what is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import picture_files
import pytest
import pytest_asyncio
import torch
import video_files as files

from trtx.ipc.shared_tensor import open_shared, remove_shared
from trtx.media import Blob, MediaError, MediaLimits, PicturePool, VideoRule, content_key, processor_options
from trtx.media import video_options as video_options_of

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
LIMITS = MediaLimits(
    decode_processes=1, decode_timeout_s=300, max_video_frames=6, max_video_s=20, max_image_pixels=200 * 200
)
_MEAN, _STD = [0.48, 0.45, 0.4], [0.26, 0.27, 0.28]
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 56 * 56, "max_pixels": 28 * 28 * 16,
    "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "image_mean": _MEAN, "image_std": _STD,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PicturePool]:
    tensors = tmp_path_factory.mktemp("tensors")
    async with PicturePool(model, LIMITS, videos="each", directory=tensors) as one:
        yield one
    assert not [*tensors.iterdir()], "a test left its tensor"


def expected(model: Path, file: bytes, rule: VideoRule, fps: float, turned: bool = False) -> tuple[torch.Tensor, Any]:
    """Patches and grid: frames of another decoding, and transformers' own code."""
    from transformers import AutoImageProcessor

    pictures = [np.rot90(one) if turned else one for one in files.decoded(file)]
    processor = AutoImageProcessor.from_pretrained(model, backend="pil")
    size = files.QWEN_3.size if rule == "all" else processor.size  # min_pixels says nothing to Qwen3-VL's class
    patches, grid, _ = files.prepared(
        processor, pictures, fps, is_third=rule == "all", size=size, most=LIMITS.max_video_frames
    )
    return patches, tuple(grid[0].tolist())


CASES: dict[str, tuple[bytes, float, VideoRule]] = {
    "H.264": (files.saved(files.drawn(25)), 10.0, "each"),
    "of all frames' pixels": (files.saved(files.drawn(9, 90, 50), rate=2), 2.0, "all"),
    "VP9": (files.saved(files.drawn(12), codec="libvpx-vp9", container="webm"), 10.0, "each"),
    "VP8 in Matroska": (files.saved(files.drawn(7), codec="libvpx", container="matroska", rate=1), 1.0, "each"),
    # As files.saved(files.drawn(5, 80, 80), codec="libsvtav1") made it. That encoder gives root's process real-time
    # priority, and all that the process starts after it (seen: PyAV 18.1.0).
    "AV1": ((Path(__file__).parent / "five_frames_av1.mp4").read_bytes(), 10.0, "each"),
    "one frame": (files.saved(files.drawn(1)), 10.0, "each"),
    "tall": (files.saved(files.drawn(6, 50, 120)), 10.0, "each"),
}


async def test_frames_are_prepared_as_transformers_does(model: Path, tmp_path: Path) -> None:
    for rule in ("each", "all"):
        async with PicturePool(model, LIMITS, videos=rule, directory=tmp_path) as pool:
            for name, (file, fps, of_rule) in CASES.items():
                if of_rule != rule:
                    continue
                prepared = await pool.prepare(Blob(file, name, "video"))
                wanted, grid = expected(model, file, rule, fps)
                found = open_shared(prepared.pixels)
                remove_shared(prepared.pixels)
                assert prepared.grid == grid, name
                assert prepared.clip is not None and len(prepared.clip.at_s) == grid[0], name
                torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0, msg=name)


async def test_a_video_is_turned_as_it_says(pool: PicturePool, model: Path) -> None:
    file = files.saved(files.drawn(4, 100, 60), rotation=90)
    prepared = await pool.prepare(Blob(file, "a telephone's", "video"))
    wanted, grid = expected(model, file, "each", 10.0, turned=True)
    assert prepared.grid == grid and grid[1] > grid[2]
    torch.testing.assert_close(open_shared(prepared.pixels), wanted, atol=1e-5, rtol=0)
    remove_shared(prepared.pixels)


async def test_a_video_is_mirrored_as_it_says(pool: PicturePool) -> None:
    """By the standard's matrix: a pixel at x, y is shown at ax + cy, bx + dy, moved to where all is to be seen."""
    pictures = [
        np.pad(one, ((0, 28), (0, 0), (0, 0))) for one in files.drawn(4, 112, 56)
    ]  # dark below, red at the left
    file = files.saved(pictures)
    unturned = (await pool.prepare(Blob(file, "plain", "video"))).pixels
    plain = open_shared(unturned)
    remove_shared(unturned)
    assert plain.ndim == 2
    for matrix in (
        (-1, 0, 0, 1),
        (1, 0, 0, -1),
        (0, 1, 1, 0),
        (0, -1, -1, 0),
        (0, 1, -1, 0),
        (-1, 0, 0, -1),
        (1, 0, 0, 1),
    ):
        prepared = await pool.prepare(Blob(files.shown_by(file, *matrix), str(matrix), "video"))
        (time, high, wide), found = prepared.grid or (0, 0, 0), open_shared(prepared.pixels)
        remove_shared(prepared.pixels)
        a, b, c, d = matrix
        right, down = np.array([a, b]), np.array([c, d])
        assert (high < wide) == (a != 0), matrix
        # Corners of what is stored, red above at the left and dark below, where they are shown.
        shown = {
            name: np.array(at) @ np.array([right, down]) for name, at in {"red": (-1, -1), "dark": (-1, 1)}.items()
        }
        assert seen_at(found, time, high, wide, shown["red"])[0] > 1.0, matrix
        assert seen_at(found, time, high, wide, shown["dark"]).max() < -1.0, matrix
        assert seen_at(found, time, high, wide, -shown["red"]).max() < -1.0, matrix
        assert seen_at(found, time, high, wide, -shown["dark"])[0] < 1.0, matrix


def seen_at(pixels: torch.Tensor, time: int, high: int, wide: int, corner: Any) -> Any:
    """Mean of each channel of the patch in a corner: x and y, each -1 or 1."""
    # Patches lie in blocks of 2x2, each as [channel, frame, 14, 14].
    blocks = pixels[: high * wide].reshape(high // 2, wide // 2, 2, 2, 3, -1).transpose(1, 2).reshape(high, wide, 3, -1)
    x, y = (-1 if one > 0 else 0 for one in corner)
    return blocks[y, x].mean(-1).numpy()


async def test_frames_of_a_varying_rate_are_those_on_show(pool: PicturePool) -> None:
    """Eight frames of which the seventh stays from 0.6 s to 10 s: all but the first are of it."""
    for container in ("mp4", "matroska"):
        file = files.saved(files.drawn(8), container=container, times_ms=[0, 100, 200, 300, 400, 500, 600, 10_000])
        prepared = await pool.prepare(Blob(file, container, "video"))
        (time, high, wide), found, clip = prepared.grid or (0, 0, 0), open_shared(prepared.pixels), prepared.clip
        remove_shared(prepared.pixels)
        first, second, third = found.reshape(time, high * wide, -1)
        torch.testing.assert_close(second, third, atol=0.0, rtol=0)
        assert (first - second).abs().max() > 0.5
        assert clip is not None
        assert clip.at_s == pytest.approx([clip.step_s * one for one in (0.25, 1.25, 2.25)])
        assert 10.0 / 3 <= clip.step_s < 10.3 / 3, "of how long it plays"


VIDEO = files.saved(files.drawn(8))
WEBM = files.saved(files.drawn(60), codec="libvpx-vp9", container="webm")
SOUNDING = files.saved(files.drawn(10), codec="libvpx", container="webm", sound_s=1.5)
FRAGMENTS = files.saved(files.drawn(30), movflags="dash+skip_trailer")
WHOLE = {
    "sound that ends later": SOUNDING,
    "the same in an MP4": files.saved(files.drawn(10), sound_s=2.5),
    "fragments": FRAGMENTS,
    "a rate that milliseconds round": files.saved(files.drawn(50), container="matroska", rate=Fraction(60000, 1001)),
    "a browser's, without an end": files.saved(files.drawn(10), container="mp4", movflags="frag_keyframe+empty_moov"),
}
REFUSED: dict[str, tuple[bytes, int, str]] = {
    "a picture": (picture_files.png_header(4, 4), 415, "not a video of a supported format; expected MP4"),
    "a list of other files": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", 415, "not a video of a supported format"),
    "sound": (files.sound(), 422, "holds no video stream"),
    "music with a cover": (files.sound(files.drawn(1)[0]), 422, "holds no video stream"),
    "a cut one": (VIDEO[: len(VIDEO) // 2], 422, "send the whole file"),
    "a cut WebM": (WEBM[: len(WEBM) // 2], 422, "broken or cut short"),
    "a WebM without its last frame": (
        files.without_last_frame(WEBM),
        422,
        r"states 6.000 s and its frames end at 5.900 s",
    ),
    "one with sound, likewise": (
        files.without_last_frame(SOUNDING),
        422,
        "states 1.000 s and its frames end at 0.900 s",
    ),
    "an MP4 without its last bytes": (FRAGMENTS[:-10], 422, "broken or cut short"),
    "one with a frame that is guessed at": (files.damaged(VIDEO, 4), 422, "broken or cut short"),
    "noise": (b"\0\0\0\x18ftypisom" + bytes(range(256)) * 8, 422, "send the whole file"),
    "noise in the middle": (VIDEO[:200] + bytes(len(VIDEO) - 900) + VIDEO[-700:], 422, "broken or cut short"),
    "a long one": (files.saved(files.drawn(25), rate=1), 413, "plays longer than 20 s"),
    "a long one of few frames": (
        files.saved(files.drawn(3), container="matroska", times_ms=[0, 10_000, 20_000]),
        413,
        r"plays longer than 20 s, the limit of --max-video-s",
    ),
    "a large one": (files.saved(files.drawn(3, 400, 300)), 413, "400x300 pixels; expected at most 40000"),
    "a thin one": (
        files.saved(files.drawn(3, 1202, 4)),
        422,
        "1202x4 pixels, which this model can't take; send it cut to a shape",
    ),
    "one at an angle": (files.shown_by(VIDEO, 0.7071, 0.7071, -0.7071, 0.7071), 422, "not a multiple of 90 degrees"),
    "one shown as a point": (files.shown_by(VIDEO, 0, 0, 0, 0), 422, "not a multiple of 90 degrees"),
    "another codec": (
        files.saved(files.drawn(3), codec="ffv1", container="matroska"),
        415,
        "encoded as ffv1, which is not supported; expected one of av1",
    ),
}


async def test_what_is_whole_is_not_called_cut(pool: PicturePool) -> None:
    for name, file in WHOLE.items():
        remove_shared((await pool.prepare(Blob(file, name, "video"))).pixels)


async def test_what_is_no_video_that_can_be_taken_is_refused_and_harms_no_other(pool: PicturePool) -> None:
    processes = pool.pids
    for name, (file, status, says) in REFUSED.items():
        with pytest.raises(MediaError, match=says) as refused:
            await pool.prepare(Blob(file, f"[{name}]", "video"))
        assert refused.value.status == status, name
        assert str(refused.value).startswith(f"[{name}]")
    assert pool.pids == processes, "none cost a process"
    remove_shared((await pool.prepare(Blob(VIDEO, "whole", "video"))).pixels)


async def test_a_video_is_no_picture_and_models_may_take_none(model: Path, tmp_path: Path) -> None:
    async with PicturePool(model, LIMITS, directory=tmp_path) as pool:
        with pytest.raises(MediaError, match="not an image of a supported format"):
            await pool.prepare(Blob(VIDEO, "a video sent as a picture"))
        with pytest.raises(MediaError, match="is a video, and this model supports images only"):
            await pool.prepare(Blob(VIDEO, "a video", "video"))


async def test_a_key_tells_a_video_from_a_picture_and_how_many_frames_are_taken(model: Path) -> None:
    options = [processor_options(model), video_options_of(model, 6), video_options_of(model, 8)]
    assert len({content_key(VIDEO, model="m", options=one) for one in options}) == 3
