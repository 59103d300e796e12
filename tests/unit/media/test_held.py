"""Memory of what was fetched, over requests; labels."""

from __future__ import annotations

import asyncio
import base64
import json

import pytest

from trtx.media import Blob, HeldMedia, MediaError, MediaLimits
from trtx.media.blob import label_of
from trtx.media.fetch import fetch

LIMITS = MediaLimits(max_media_bytes=1000)


def url(size: int) -> str:
    return "data:;base64," + base64.b64encode(bytes(size)).decode()


async def test_files_count_until_nobody_has_them() -> None:
    held = HeldMedia(2500)
    kept = [await fetch(url(1000), LIMITS, held=held) for _ in range(2)]
    assert held.bytes == 2000
    with pytest.raises(MediaError, match="2500 bytes") as refused:
        await fetch(url(501), LIMITS, held=held)
    assert refused.value.status == 429
    await fetch(url(500), LIMITS, held=held)
    assert held.bytes == 2000, "what nobody kept does not count"
    kept.pop()
    assert held.bytes == 1000
    kept.append(await fetch(url(1000), LIMITS, held=held))
    assert held.bytes == 2000


async def test_what_could_not_be_held_alone_is_too_large_rather_than_too_much_now() -> None:
    held = HeldMedia(999)
    with pytest.raises(MediaError, match="data: URL of .* is larger than 999 bytes") as refused:
        await fetch(url(1000), LIMITS, held=held)
    assert refused.value.status == 413


@pytest.mark.parametrize("given", [{"media_memory_bytes": 60_000}, {"max_media_bytes": 4 << 30}], ids=str)
def test_memory_below_one_file_is_refused_also_where_one_of_both_is_a_default(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="media_memory_bytes is .*, but one file may have .* bytes"):
        MediaLimits.model_validate_json(json.dumps(given))  # as a worker reads them
    assert MediaLimits(max_media_bytes=60_000, media_memory_bytes=60_000)


async def test_many_at_once_do_not_pass_the_limit_together() -> None:
    held = HeldMedia(10_000)
    found = await asyncio.gather(*(fetch(url(999), LIMITS, held=held) for _ in range(30)), return_exceptions=True)
    assert sum(isinstance(one, Blob) for one in found) == 10
    assert all(isinstance(one, Blob) or (isinstance(one, MediaError) and one.status == 429) for one in found)


async def test_where_all_is_taken_nothing_is_fetched() -> None:
    held = HeldMedia(1000)
    kept = await fetch(url(1000), LIMITS, held=held)
    with pytest.raises(MediaError) as refused:  # before its data are looked at, which are broken
        await fetch("data:;base64,!", LIMITS, held=held)
    assert refused.value.status == 429 and kept


@pytest.mark.parametrize(
    ("given", "label"),
    [
        ("https://user:secret@host.example:8443/a/b.png?signature=secret#x", "https://host.example:8443/a/b.png"),
        ("https://host.example/" + "a" * 500, "https://host.example/" + "a" * 96 + "..."),
        ("data:image/png;base64,secret", "data:image/png URL of 28 characters"),
        ("data:image/" + "x" * 100 + ";base64,AAAA", "data: URL of 123 characters"),
        ("data:secret", "data: URL of 11 characters"),
        ("DATA:Image/PNG,secret", "data:Image/PNG URL of 21 characters"),
        ("file:///pictures/a%20b.png", "file:///pictures/a%20b.png"),
        ("https://host/\x1b[31mred\n\u202egnp.exe", "https://host/?[31mred?gnp.exe"),
        ("https://[::1/secret?secret", "https://[::1/secret"),
        ("x.png?secret", "x.png"),
        ("javascript:alert(1)", "javascript://alert(1)"),
        ("\n", "an empty URL"),
    ],
)
async def test_a_label_is_short_printable_and_says_no_secret(given: str, label: str) -> None:
    assert label_of(given) == label
