"""A checkpoint's own image processor in the pool gives what it gives in transformers; embeddings as files; keys."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import picture_files as files
import pytest
import torch
from examples import first_of
from PIL import Image

from trtx.errors import UsageError
from trtx.ipc.shared_tensor import SharedTensorError, open_shared, remove_shared
from trtx.media import Blob, MediaError, MediaLimits, PicturePool, Prepared, content_key, processor_options

pytestmark = pytest.mark.slow

ONE = MediaLimits(decode_processes=1, decode_timeout_s=300)
_MEAN, _STD = [0.48, 0.45, 0.4], [0.26, 0.27, 0.28]
CLIP = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28},
    "image_mean": _MEAN,
    "image_std": _STD,
}
QWEN = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 56 * 56,
    "max_pixels": 28 * 28 * 16,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": _MEAN,
    "image_std": _STD,
}


def checkpoint(directory: Path, processor: dict[str, Any]) -> Path:
    (directory / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    return directory


def values(prepared: Prepared) -> np.ndarray:
    found = open_shared(prepared.pixels).numpy().copy()
    remove_shared(prepared.pixels)
    return found


def pictures() -> dict[str, Image.Image]:
    random = np.random.default_rng(9)
    return {
        f"{width}x{height}": Image.fromarray(random.integers(0, 256, (height, width, 3)).astype(np.uint8))
        for width, height in ((28, 28), (100, 40), (40, 100), (28, 56), (5, 3), (300, 290))
    }


async def check_against_transformers(pool: PicturePool, model: Path) -> None:
    from transformers import AutoImageProcessor

    reference = AutoImageProcessor.from_pretrained(model, backend="pil")
    for name, picture in pictures().items():
        blob = Blob(files.saved(picture, "PNG"), name)
        prepared, counted = await pool.prepare(blob), await pool.patches(blob)
        expected = reference(images=[picture], return_tensors="np")
        assert prepared.pixels.dtype == "float32"
        np.testing.assert_array_equal(values(prepared), expected["pixel_values"], err_msg=name)
        grid = expected.get("image_grid_thw")
        assert prepared.grid == (None if grid is None else tuple(grid[0].tolist())), name
        assert counted == (None if grid is None else int(np.prod(grid[0]))), name


async def test_pixels_of_a_fixed_size_are_those_of_transformers(tmp_path: Path) -> None:
    """And of a picture of just that size, where nothing but arithmetic is left, they are what is computed here, with
    the picture turned by EXIF and on white before."""
    model = checkpoint(tmp_path, CLIP)
    drawn = np.random.default_rng(2).integers(0, 256, (28, 28, 4)).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    data = files.saved(Image.fromarray(drawn), "PNG", exif=exif.tobytes())
    seen = np.rot90(files.on_white(drawn[..., :3].astype(int), drawn[..., 3].astype(int)), -1)
    async with PicturePool(model, ONE, directory=tmp_path) as pool:
        await check_against_transformers(pool, model)
        found = values(await pool.prepare(Blob(data, "x")))
    np.testing.assert_allclose(found, ((seen / 255 - _MEAN) / _STD).transpose(2, 0, 1)[None], atol=1e-5)
    assert not list(tmp_path.glob("*.tensor")), "whoever got a tensor removed it, and nobody made another"


async def test_pixels_with_a_grid_are_those_of_transformers(tmp_path: Path) -> None:
    """And a shape that the model can't take is the picture's fault, not the process's."""
    model = checkpoint(tmp_path, QWEN)
    async with PicturePool(model, ONE, directory=tmp_path) as pool:
        with pytest.raises(MediaError) as refused:
            await pool.prepare(Blob(files.saved(Image.new("RGB", (3000, 1)), "PNG"), "a line"))
        assert (refused.value.status, "3000x1 pixels" in str(refused.value)) == (422, True)
        await check_against_transformers(pool, model)


async def test_what_can_not_be_opened_is_refused_alike_by_whoever_counts_and_by_whoever_decodes(tmp_path: Path) -> None:
    """Also where there is not memory enough to look at a header: that is not a broken file."""
    saved = files.saved(Image.new("RGB", (30, 30)), "PNG")
    webp = files.saved(Image.new("RGB", (30, 30)), "WEBP", lossless=True)
    refused = {
        413: [saved + bytes(48 << 20)],
        422: [saved[:20], webp[:25], webp[:20] + bytes(len(webp) - 20), webp.replace(b"VP8L", b"VP8Z")],
    }
    limits = ONE.model_copy(update={"decode_memory_bytes": 64 << 20})
    async with PicturePool(checkpoint(tmp_path, QWEN), limits, directory=tmp_path) as pool:
        for status, broken in refused.items():
            for data in broken:
                told = []
                for ask in (pool.patches, pool.prepare):
                    with pytest.raises(MediaError) as error:
                        await ask(Blob(data, "a picture"))
                    told.append((error.value.status, str(error.value)))
                assert told[0] == told[1] and told[0][0] == status, told
        assert await pool.patches(Blob(saved, "a picture"))


@pytest.mark.parametrize(
    ("processor", "says"),
    first_of(
        2,
        [
            (None, "no image processor"),
            ({"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": [[56, 56]]}, "image_sizes"),
            ({"image_processor_type": "NoSuchImageProcessor"}, "no image processor"),
            ({**QWEN, "patch_size": 0}, "image processor"),
        ],
    ),
    ids=["missing", "other outputs", "unknown", "broken"],
)
async def test_a_checkpoint_without_a_usable_processor_is_refused_at_the_start(
    tmp_path: Path, processor: dict[str, Any] | None, says: str
) -> None:
    if processor is not None:
        checkpoint(tmp_path, processor)
    pool = PicturePool(tmp_path, ONE)
    with pytest.raises(UsageError, match=says):
        await pool.start()
    assert pool.pids == ()


async def test_a_stripe_that_the_processor_would_enlarge_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    limits = MediaLimits(decode_processes=1, decode_timeout_s=300, max_image_pixels=100_000)
    stripes = {size: files.saved(Image.new("RGB", size, "red"), "PNG") for size in ((1, 1000), (1000, 1), (9, 1000))}
    async with PicturePool(checkpoint(tmp_path, CLIP), limits, directory=tmp_path) as pool:
        for size, file in stripes.items():
            if 9 in size:  # 28 x 3111
                assert values(await pool.prepare(Blob(file, "it"))).shape == (1, 3, 28, 28)
                continue
            with pytest.raises(MediaError, match="processor would make 784000 before it cuts it") as refused:
                await pool.prepare(Blob(file, "it"))
            assert refused.value.status == 413
            assert (await pool.rgb(Blob(file, "it"))).size == 3000, "the picture itself is none too large"
    narrow = tmp_path / "qwen"
    narrow.mkdir()
    async with PicturePool(checkpoint(narrow, QWEN), limits, directory=tmp_path) as pool:
        remove_shared((await pool.prepare(Blob(stripes[9, 1000], "it"))).pixels)


def safetensors(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    header, at, body = {}, 0, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at, body = at + len(data), body + data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


ROWS = np.random.default_rng(4).standard_normal((3, 8)).astype(np.float32)
_F32 = ("F32", [3, 8], ROWS.tobytes())
_GRID = ("I64", [3], np.array([1, 2, 6], np.int64).tobytes())


async def test_embeddings_are_read_exactly(tmp_path: Path) -> None:
    bfloat16 = ROWS.view(np.uint32) >> 16
    float16 = ROWS.astype(np.float16)
    cases = {
        "F32": ({"e": _F32}, ROWS, None),
        "with a grid": ({"e": _F32, "grid_thw": _GRID}, ROWS, (1, 2, 6)),
        "one of a batch": ({"image": ("F32", [1, 3, 8], ROWS.tobytes())}, ROWS, None),
        "F16": ({"e": ("F16", [3, 8], float16.tobytes())}, float16.astype(np.float32), None),
        "BF16": (
            {"e": ("BF16", [3, 8], bfloat16.astype(np.uint16).tobytes())},
            (bfloat16.astype(np.uint32) << 16).view(np.float32),
            None,
        ),
    }
    async with PicturePool(None, ONE, directory=tmp_path) as pool:
        for name, (tensors, expected, grid) in cases.items():
            given = await pool.embedding(Blob(safetensors(tensors), name), hidden=8)
            np.testing.assert_array_equal(open_shared(given.rows).numpy(), expected, err_msg=name)
            assert given.grid == grid
            remove_shared(given.rows)


async def test_embeddings_are_rounded_as_torch_rounds_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    spread = rng.standard_normal((50, 8)) * 10.0 ** rng.integers(-8, 4, (50, 8))
    halves = 1 + np.arange(400).reshape(50, 8) / 256  # on and between two values of bfloat16
    values = np.concatenate([spread, halves, -halves]).astype(np.float32)
    file = safetensors({"e": ("F32", [150, 8], values.tobytes())})
    large = safetensors({"e": ("F32", [1, 8], np.full(8, 7e4, np.float32).tobytes())})
    async with PicturePool(None, ONE, directory=tmp_path) as pool:
        for dtype in (torch.bfloat16, torch.float16):
            name = str(dtype).removeprefix("torch.")
            given = await pool.embedding(Blob(file, "it"), hidden=8, dtype=name)
            found = open_shared(given.rows)
            assert found.dtype == dtype
            assert torch.equal(found, torch.tensor(values).to(dtype))
            remove_shared(given.rows)
        with pytest.raises(MediaError, match="values outside the range of float16"):
            await pool.embedding(Blob(large, "it"), hidden=8, dtype="float16")


async def test_rows_whose_squares_overflow_are_refused_in_every_dtype(tmp_path: Path) -> None:
    """A norm of the decoder would make zeros of such a row, and an answer to nothing."""
    signs = np.where(np.arange(24) % 2, 1, -1).reshape(3, 8).astype(np.float32)
    async with PicturePool(None, ONE, directory=tmp_path) as pool:
        for dtype in ("float32", "bfloat16"):
            for value in (1e38, 7e18):
                file = safetensors({"e": ("F32", [3, 8], (signs * np.float32(value)).tobytes())})
                with pytest.raises(MediaError, match=rf"values up to {value:.1e}".replace("+", r"\+")) as refused:
                    await pool.embedding(Blob(file, "it"), hidden=8, dtype=dtype)
                assert refused.value.status == 422
            file = safetensors({"e": ("F32", [3, 8], (signs * np.float32(6e18)).tobytes())})
            given = await pool.embedding(Blob(file, "it"), hidden=8, dtype=dtype)
            assert np.isfinite(open_shared(given.rows).float().numpy()).all()
            remove_shared(given.rows)


_BAD = np.full((3, 8), np.nan, np.float32)
_WHOLE = safetensors({"e": _F32})
REFUSED = {
    "pickle": (b"\x80\x04\x95" + bytes(100), 415),
    "zip": (b"PK\x03\x04" + bytes(100), 415),
    "a header of gigabytes": (struct.pack("<Q", 1 << 40) + b"{}", 415),
    "a large header": (struct.pack("<Q", 1 << 17) + b" " * (1 << 17), 415),
    "short": (b"1234", 415),
    "no JSON": (struct.pack("<Q", 2) + b"[[", 422),
    "cut short": (_WHOLE[:-1], 422),
    "bytes behind": (_WHOLE + b"x", 422),
    "offsets outside": (_WHOLE.replace(b"[0, 96]", b"[1, 97]"), 422),
    "shape and bytes differ": (safetensors({"e": ("F32", [3, 9], ROWS.tobytes())}), 422),
    "a shape that overflows": (safetensors({"e": ("F32", [1 << 62, 8], ROWS.tobytes())}), 422),
    "no tensor": (safetensors({}), 422),
    "two tensors": (safetensors({"a": _F32, "b": _F32}), 422),
    "other width": (safetensors({"e": ("F32", [6, 4], ROWS.tobytes())}), 422),
    "no rows": (safetensors({"e": ("F32", [0, 8], b"")}), 422),
    "one dimension": (safetensors({"e": ("F32", [24], ROWS.tobytes())}), 422),
    "a batch of two": (safetensors({"e": ("F32", [2, 3, 8], ROWS.tobytes() * 2)}), 422),
    "integers": (safetensors({"e": ("I32", [3, 8], ROWS.tobytes())}), 422),
    "not finite": (safetensors({"e": ("F32", [3, 8], _BAD.tobytes())}), 422),
    "a grid of floats": (safetensors({"e": _F32, "grid_thw": ("F32", [3], bytes(12))}), 422),
    "a grid of zeros": (safetensors({"e": _F32, "grid_thw": ("I64", [3], bytes(24))}), 422),
    "a grid of two": (safetensors({"e": _F32, "grid_thw": ("I64", [2], b"\1" + bytes(15))}), 422),
}


async def test_files_that_hold_no_embedding_are_refused(tmp_path: Path) -> None:
    async with PicturePool(None, ONE, directory=tmp_path) as pool:
        pids = pool.pids
        for name, (data, status) in REFUSED.items():
            with pytest.raises(MediaError) as refused:
                await pool.embedding(Blob(data, "it"), hidden=8)
            assert refused.value.status == status, f"{name}: {refused.value}"
            assert len(str(refused.value)) < 200
        assert pool.pids == pids
    assert not list(tmp_path.iterdir())


async def test_a_directory_that_is_gone_is_no_fault_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "tensors").mkdir()
    async with PicturePool(None, ONE, directory=tmp_path / "tensors") as pool:
        pids = pool.pids
        (tmp_path / "tensors").rmdir()
        with pytest.raises(SharedTensorError, match="can't write a tensor"):
            await pool.embedding(Blob(_WHOLE, "it"), hidden=8)
        assert pool.pids == pids


def test_keys_differ_in_each_of_their_parts_and_in_nothing_else() -> None:
    key = content_key(b"file", model="m", options="o")
    assert key == content_key(b"file", model="m", options="o") and len(key) == 32
    others = [
        content_key(b"filf", model="m", options="o"),
        content_key(b"file", model="n", options="o"),
        content_key(b"file", model="m", options="p"),
        content_key(b"file", model="mo", options=""),
        content_key(b"ofile", model="m", options=""),
        content_key(b"", model="m", options="ofile"),
    ]
    assert len({key, *others}) == 7


def test_a_key_is_the_same_in_every_process_and_version() -> None:
    """Workers of one topology know a picture by it, whichever of them made it."""
    assert (
        content_key(b"file", model="m", options="o").hex()
        == "1432d4f1f7be21f0afca9acddb6e9d69111ea1cc60546d7062d32f233bea0d52"
    )


def test_options_follow_the_checkpoints_processor(tmp_path: Path) -> None:
    first = processor_options(checkpoint(tmp_path, CLIP))
    assert first == processor_options(checkpoint(tmp_path, dict(reversed(CLIP.items()))))
    assert first != processor_options(checkpoint(tmp_path, {**CLIP, "image_mean": [0.5, 0.5, 0.5]}))
    assert all(name in first for name in ("pillow", "transformers", "numpy"))
