"""data: URLs."""

from __future__ import annotations

import asyncio
import base64
import itertools
import random
import re
import time
import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtx.media import MediaError, MediaLimits
from trtx.media.fetch import fetch

pytestmark = pytest.mark.slow

LIMITS = MediaLimits(max_media_bytes=2_000_000)
BYTES = random.Random(1).randbytes(1_000_000)  # several pieces of what is decoded at a time
ENCODED = base64.b64encode(BYTES).decode()


async def test_base64_is_decoded_whole() -> None:
    blob = await fetch(f"data:image/png;base64,{ENCODED}", LIMITS)
    assert blob.data == BYTES
    assert blob.label == f"data:image/png URL of {len(ENCODED) + 22} characters"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, *range(196_605, 196_612)])
async def test_every_length_comes_back(size: int) -> None:
    """Around the place where one piece ends and the next begins."""
    data = BYTES[:size]
    assert (await fetch("data:;base64," + base64.b64encode(data).decode(), LIMITS)).data == data


@pytest.mark.parametrize(
    "url",
    [
        "DATA:image/png;BASE64," + ENCODED,
        "data:;base64," + ENCODED,
        "data:image/png;charset=utf-8;base64," + ENCODED,
        "data:image/png;base64," + urllib.parse.quote(ENCODED, safe=""),
        "data:image/png;base64," + "%" + ENCODED.encode().hex("%"),
        "data:image/png;base64," + "\r\n".join(ENCODED[at : at + 76] for at in range(0, len(ENCODED), 76)),
        "data:image/png;base64," + "%0A".join(ENCODED[at : at + 7] for at in range(0, len(ENCODED), 7)),
        "data:application/octet-stream," + urllib.parse.quote_from_bytes(BYTES, safe=""),
        "data:,%" + BYTES.hex("%").upper(),
    ],
    ids=[
        "capitals",
        "no type",
        "charset",
        "escaped",
        "all escaped",
        "lines",
        "escaped lines",
        "percent",
        "all percent",
    ],
)
async def test_every_way_of_writing_it_gives_the_same_bytes(url: str) -> None:
    assert (await fetch(url, LIMITS)).data == BYTES


@given(st.lists(st.sampled_from([*"%=+&_ \r\n.A", "%3D", "%3d", "%25", "%0A", "%00", "%fF", "==", "=\n"]), max_size=40))
def test_escapes_mean_what_they_mean_in_every_url(parts: list[str]) -> None:
    """As Python's own decoder of URLs has it, where each is whole."""
    text = "".join(parts)
    expected = urllib.parse.unquote_to_bytes(text)
    is_whole = not re.search(r"%(?![0-9A-Fa-f]{2})", text)
    try:
        found = asyncio.run(fetch("data:," + text, LIMITS)).data
    except MediaError as error:
        assert error.status == 400 and not (is_whole and expected)
    else:
        assert is_whole and found == expected


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("data:", 400),
        ("data:image/png;base64", 400),
        ("data:image/png;base64,", 400),
        ("data:" + "x" * 1000 + ",AAAA", 400),
        ("data:image/png;base64,====", 400),
        ("data:image/png;base64,A", 400),
        ("data:image/png;base64,AA", 400),
        ("data:image/png;base64,AAA", 400),
        ("data:image/png;base64,AAAA=", 400),
        ("data:image/png;base64,AA==AAAA", 400),
        ("data:image/png;base64," + ENCODED[:262_140] + "AA==" + ENCODED[:400_000], 400),
        ("data:image/png;base64,AA-_", 400),
        ("data:image/png;base64,AA!A", 400),
        ("data:image/png;base64,AAAÄ", 400),
        ("data:image/png;base64,AAA%", 400),
        ("data:image/png;base64,AAA%4", 400),
        ("data:image/png;base64,AAA%zz", 400),
        ("data:,%", 400),
        ("data:,\ud800", 400),
        ("data:image/png;base64," + ENCODED[:-2], 400),
        ("data:image/png;base64," + "A" * 3_000_000, 413),
        ("data:image/png;base64," + "A" * 300_000_000, 413),
        ("data:," + "A" * 2_000_001, 413),
    ],
    ids=range(23),
)
async def test_a_broken_or_large_one_is_refused(url: str, status: int) -> None:
    with pytest.raises(MediaError) as refused:
        await fetch(url, LIMITS)
    assert refused.value.status == status, str(refused.value)
    assert len(str(refused.value)) < 250 and "AAAA" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("data:image/png;base64,AA-_", "expected base64 with + and /, filled up with =: send all of it"),
        ("data:image/png,%zz", "expected ASCII, two hexadecimal digits behind each %: send all of it"),
    ],
)
async def test_a_broken_one_is_told_what_was_expected(url: str, expected: str) -> None:
    with pytest.raises(MediaError, match=re.escape(expected)):
        await fetch(url, LIMITS)


async def test_the_loop_goes_on_while_one_is_decoded() -> None:
    """Its longest wait for a turn is a small part of the whole, as it is not where one call decodes it all.

    A machine that is busy elsewhere keeps it waiting too: the best of some attempts counts.
    """
    limits = MediaLimits(max_media_bytes=64 << 20)
    url = "data:image/png;base64," + ENCODED[:-4] * 30
    parts = []
    for _ in range(8):
        turns = [time.perf_counter()]

        async def watch(turns: list[float] = turns) -> None:
            while True:
                await asyncio.sleep(0.001)
                turns.append(time.perf_counter())

        watching = asyncio.create_task(watch())
        blob = await fetch(url, limits)
        turns.append(time.perf_counter())
        watching.cancel()
        assert len(blob.data) > 29_000_000
        parts.append(max(after - before for before, after in itertools.pairwise(turns)) / (turns[-1] - turns[0]))
        if parts[-1] < 0.3:
            return
    raise AssertionError(f"the loop's longest wait was these parts of the whole: {parts}")
