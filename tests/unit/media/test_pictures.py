"""Pictures of every kind that is taken, pixel by pixel, and files of every kind that is not."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import AsyncIterator

import numpy as np
import picture_files as files
import pytest
import pytest_asyncio
from PIL import Image

from trtx.media import Blob, MediaError, MediaLimits, PicturePool

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = MediaLimits(decode_processes=1, max_image_pixels=100_000, decode_timeout_s=300)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[PicturePool]:
    async with PicturePool(None, LIMITS) as found:
        yield found


async def shown(pool: PicturePool, data: bytes) -> np.ndarray:
    return await pool.rgb(Blob(data, "it"))


async def refusal(pool: PicturePool, data: bytes) -> MediaError:
    with pytest.raises(MediaError) as refused:
        await shown(pool, data)
    text = str(refused.value)
    assert text.startswith("it ") and len(text) < 200 and "\n" not in text, text
    return refused.value


def same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("depth", "color", "clear"),
    [
        (depth, color, clear)
        for color, depths in files.PNG_DEPTHS.items()
        for depth in depths
        for clear in ((False, True) if color in (0, 2, 3) else (False,))
    ],
)
async def test_every_kind_of_png_looks_as_on_a_white_page(
    pool: PicturePool, depth: int, color: int, clear: bool
) -> None:
    data, expected = files.png_case(depth, color, clear=clear)
    same(await shown(pool, data), expected)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
async def test_what_is_stored_without_loss_comes_back(pool: PicturePool, kind: str) -> None:
    picture = Image.fromarray(files.drawing())
    if kind == "GIF":
        picture = picture.quantize(64)
    data = files.saved(picture, kind, **({"lossless": True} if kind == "WEBP" else {}))
    same(await shown(pool, data), np.asarray(picture.convert("RGB")))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 20}], ids=str)
async def test_a_jpeg_is_what_pillow_makes_of_it(pool: PicturePool, options: dict[str, object]) -> None:
    data = files.saved(Image.fromarray(files.drawing()), "JPEG", **options)
    same(await shown(pool, data), np.asarray(Image.open(io.BytesIO(data))))


async def test_a_gray_jpeg_is_gray(pool: PicturePool) -> None:
    gray = np.asarray(Image.fromarray(files.drawing()).convert("L"))
    found = await shown(pool, files.saved(Image.fromarray(gray), "JPEG", quality=95))
    assert (found[..., 0] == found[..., 2]).all() and np.abs(found[..., 0].astype(int) - gray).max() < 12


async def test_cmyk_is_not_seen_as_its_negative(pool: PicturePool) -> None:
    ink = np.zeros((16, 64, 4), np.uint8)
    ink[:, 16:32, 0] = 255  # cyan
    ink[:, 32:48, 1] = ink[:, 32:48, 2] = 255  # red
    ink[:, 48:, 3] = 255  # black
    found = await shown(pool, files.saved(Image.fromarray(ink, mode="CMYK"), "JPEG", quality=95))
    seen = [found[8, at].astype(int) for at in (8, 24, 40, 56)]
    expected = [(255, 255, 255), (0, 255, 255), (255, 0, 0), (0, 0, 0)]
    assert np.abs(np.array(seen) - expected).max() < 12, seen


@pytest.mark.parametrize("alpha", [0, 1, 127, 128, 254, 255])
async def test_transparency_of_a_webp_shows_white(pool: PicturePool, alpha: int) -> None:
    values = np.dstack([files.drawing(), np.full((files.HEIGHT, files.WIDTH), alpha, np.uint8)])
    data = files.saved(Image.fromarray(values), "WEBP", lossless=True, exact=True)
    same(await shown(pool, data), files.on_white(values[..., :3].astype(int), values[..., 3].astype(int)))


async def test_the_transparent_colour_of_a_gif_shows_white(pool: PicturePool) -> None:
    picture = Image.fromarray(np.arange(files.WIDTH * files.HEIGHT, dtype=np.uint8).reshape(files.HEIGHT, -1) % 16)
    picture.putpalette([value for at in range(16) for value in (at * 16, 0, 255 - at * 16)])
    found = await shown(pool, files.saved(picture, "GIF", transparency=5))
    expected = np.asarray(picture.convert("RGB")).copy()
    expected[np.asarray(picture) == 5] = 255
    same(found, expected)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("value", range(1, 9))
async def test_a_picture_is_turned_as_its_camera_said(pool: PicturePool, kind: str, value: int) -> None:
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 90}, "PNG": {}}[kind]
    data = files.with_orientation(kind, value, **options)
    stored = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert stored.shape == (files.HEIGHT, files.WIDTH, 3)
    same(await shown(pool, data), files.TURNED[value](stored))


@pytest.mark.parametrize("value", [0, 9, 65535])
async def test_an_orientation_that_is_none_turns_nothing(pool: PicturePool, value: int) -> None:
    data = files.with_orientation("PNG", value)
    same(await shown(pool, data), files.drawing())


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*" + b"\xff" * 40, b"x" * 99]
)
async def test_broken_exif_is_no_reason_to_refuse_a_photograph(pool: PicturePool, exif: bytes) -> None:
    data = files.saved(Image.fromarray(files.drawing()), "JPEG")
    same(
        await shown(pool, data[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + data[2:]),
        np.asarray(Image.open(io.BytesIO(data))),
    )


async def test_of_a_photograph_with_previews_the_photograph_is_taken(pool: PicturePool) -> None:
    first = Image.fromarray(files.drawing())
    data = files.saved(first, "MPO", save_all=True, append_images=[first.resize((5, 5))])
    assert Image.open(io.BytesIO(data)).format == "MPO"
    assert (await shown(pool, data)).shape == (files.HEIGHT, files.WIDTH, 3)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
async def test_frames_are_not_dropped_without_a_word(pool: PicturePool, kind: str) -> None:
    first = Image.fromarray(files.drawing())
    data = files.saved(first, kind, save_all=True, append_images=[first.transpose(Image.Transpose.ROTATE_180)])
    error = await refusal(pool, data)
    assert (error.status, "animated" in str(error)) == (415, True)


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "PPM", "ICO", "PDF", "TGA", "JPEG2000"])
async def test_other_formats_are_refused(pool: PicturePool, kind: str) -> None:
    error = await refusal(pool, files.saved(Image.fromarray(files.drawing()), kind))
    assert (error.status, "JPEG, PNG, WEBP or GIF" in str(error)) == (415, True)


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7",
        b"RIFF\0\0\0\0AVI ",
        b"\xff\xd8",
        b"GIF88a",
        b"%!PS",
    ],
    ids=str,
)
async def test_what_is_no_picture_is_refused(pool: PicturePool, data: bytes) -> None:
    assert (await refusal(pool, data)).status == 415


BOMBS = {
    "PNG": files.png_header(100_000, 100_000) + files.chunk(b"IDAT", zlib.compress(bytes(100_000))),
    "PNG just above": files.png_header(100_001, 1) + files.chunk(b"IDAT", zlib.compress(bytes(300_004))),
    "JPEG": b"\xff\xd8\xff\xc0\x00\x11\x08\xff\xdc\xff\xdc\x03\x01\x22\x00\x02\x11\x01\x03\x11\x01\xff\xda" + bytes(99),
    "GIF": b"GIF89a\xff\xff\xff\xff\x80\0\0" + bytes(6) + b",\0\0\0\0\xff\xff\xff\xff\0\x02\x02\x4c\x01\0;",
    "WEBP": b"RIFF\xff\xff\0\0WEBPVP8X\x0a\0\0\0\x10\0\0\0" + b"\xff" * 6 + b"VP8L" + bytes(99),
    "WEBP lossy": b"RIFF\xff\xff\0\0WEBPVP8 \xff\0\0\0\x10\x02\0\x9d\x01\x2a\xff\x3f\xff\x3f" + bytes(99),
    "WEBP lossless": b"RIFF\xff\xff\0\0WEBPVP8L\xff\0\0\0\x2f\xff\xff\xff\x0f" + bytes(99),
}


@pytest.mark.parametrize("name", BOMBS)
async def test_a_bomb_is_refused_by_its_header(pool: PicturePool, name: str) -> None:
    error = await refusal(pool, BOMBS[name])
    assert (error.status, "pixels; expected at most 100000" in str(error)) == (413, True), str(error)


async def test_a_picture_of_just_the_limit_is_taken(pool: PicturePool) -> None:
    assert (await shown(pool, files.saved(Image.new("L", (100_000, 1)), "PNG"))).shape == (1, 100_000, 3)


async def test_a_header_that_promises_more_than_there_is_is_refused(pool: PicturePool) -> None:
    data = files.saved(Image.new("RGB", (50, 50)), "PNG")
    lying = files.png_header(200, 200) + data[33:]
    assert (await refusal(pool, lying)).status == 422


def whole_files() -> dict[str, bytes]:
    noise = Image.fromarray(np.random.default_rng(5).integers(0, 256, (40, 60, 3)).astype(np.uint8))
    return {
        "JPEG": files.saved(noise, "JPEG"),
        "progressive": files.saved(noise, "JPEG", progressive=True),
        "PNG": files.saved(noise, "PNG"),
        "palette": files.saved(noise.quantize(200), "PNG", transparency=3),
        "gray 16": files.png_case(16, 0, clear=True)[0],
        "WEBP": files.saved(noise, "WEBP"),
        "lossless": files.saved(noise.convert("RGBA"), "WEBP", lossless=True),
        "turned": files.with_orientation("WEBP", 6),
        "GIF": files.saved(noise.quantize(200), "GIF"),
        "CMYK": files.saved(noise.convert("CMYK"), "JPEG"),
    }


WHOLE = whole_files()


@pytest.mark.parametrize("name", WHOLE)
async def test_a_file_that_is_cut_short_is_refused(pool: PicturePool, name: str) -> None:
    """At 30 places up to nine tenths; behind that some formats have nothing that is seen."""
    data = WHOLE[name]
    for part in range(1, 31):
        error = await refusal(pool, data[: len(data) * 9 * part // (10 * 30)])
        assert error.status in (415, 422), str(error)


@pytest.mark.parametrize("name", WHOLE)
async def test_a_file_with_changed_bytes_is_a_picture_or_a_sentence(pool: PicturePool, name: str) -> None:
    """And the process goes on: what libraries do with broken files, they do in bounds."""
    rng = random.Random(name)
    pids = pool.pids
    for _ in range(60):
        data = bytearray(WHOLE[name])
        for _ in range(rng.choice([1, 1, 2, 5, 30])):
            data[rng.randrange(len(data) if rng.random() < 0.5 else 64)] = rng.randrange(256)
        try:
            found = await shown(pool, bytes(data))
        except MediaError as error:
            assert error.status in (413, 415, 422), str(error)
        else:
            assert found.size <= 3 * 100_000
    assert pool.pids == pids
