"""Several requests that look at one picture: made once, counted by picture, and refused to each by its own name."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from trtx.checkpoint.vision import VisionConfig
from trtx.engine.api import EmbeddingGone, EmbeddingUnreachable, EngineFacts, TowerOutput, share
from trtx.media import THIS_PICTURE, Blob, MediaError, MediaLimits
from trtx.media.blob import label_of
from trtx.worker.embedding_cache import EmbeddingCache, NotMade
from trtx.worker.media_metrics import MediaMetrics
from trtx.worker.pictures import Picture, Sent
from trtx.worker.sight import Sight

CONFIG = VisionConfig("LlavaForConditionalGeneration", hidden_size=4, image_token_id=9, tokens_per_image=2)


class Gate:
    """An embedder that waits until it is told how the file is, and an engine that takes what it makes."""

    facts = EngineFacts(context_length=100)

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.seen: list[Blob] = []
        self.is_broken: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def embed(self, blob: Blob, key: bytes, most_rows: int) -> TowerOutput:
        self.seen.append(blob)
        if await asyncio.shield(self.is_broken):
            raise MediaError(415, f"{blob.label} is no picture")
        return TowerOutput(share(np.zeros((2, 4), np.float32), self._directory), None)

    async def put_embedding(self, key: bytes, rows: Any) -> None: ...

    async def close(self) -> None: ...


def sight_of(gate: Gate, metrics: MediaMetrics) -> Sight:
    metrics.cache = EmbeddingCache[Picture](1 << 20, lambda key, picture: None)
    engine: Any = gate
    return Sight(
        CONFIG, engine, gate, cache=metrics.cache, limits=MediaLimits(), metrics=metrics, model="model",
        options={"image": "options"},
        reserved_bytes=64,
    )  # fmt: skip


def url(data: bytes, media_type: str = "image/png") -> Sent:
    return Sent(f"data:{media_type};base64,{base64.b64encode(data).decode()}")


def scraped(metrics: MediaMetrics) -> dict[tuple[str, str], float]:
    registry = CollectorRegistry()
    registry.register(metrics)  # type: ignore[arg-type]
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {(one.name, next(iter(one.labels.values()), "")): one.value for one in samples}


async def joined(metrics: MediaMetrics) -> None:
    assert metrics.cache is not None
    async with asyncio.timeout(30):
        while metrics.cache.stats.joined < 1:
            await asyncio.sleep(0.001)


async def test_who_joins_is_refused_under_its_own_label_alone_and_with_an_error_of_its_own(tmp_path: Path) -> None:
    gate, metrics = Gate(tmp_path), MediaMetrics()
    sight = sight_of(gate, metrics)
    urls = [url(b"same", f"image/{client}") for client in ("alice", "robert")]
    looking = [asyncio.create_task(sight.look([one])) for one in urls]
    await joined(metrics)
    gate.is_broken.set_result(True)
    first, second = await asyncio.gather(*looking, return_exceptions=True)
    assert isinstance(first, MediaError) and isinstance(second, MediaError) and first is not second
    assert [str(first), str(second)] == [f"{label_of(one.url)} is no picture" for one in urls]
    assert [first.status, second.status] == [415, 415]
    assert [blob.label for blob in gate.seen] == [THIS_PICTURE], "made once, and of nobody's"


async def test_of_several_pictures_the_broken_one_is_named(tmp_path: Path) -> None:
    gate, metrics = Gate(tmp_path), MediaMetrics()
    gate.is_broken.set_result(True)
    sight = sight_of(gate, metrics)
    urls = [url(b"one", "image/a"), url(b"other", "image/bb")]
    with pytest.raises(MediaError, match="data:image/a URL of"):
        await sight.look(urls)
    with pytest.raises(MediaError, match="data:image/bb URL of"):
        await sight.look(urls[::-1])


async def test_two_requests_of_one_picture_at_a_time_are_a_miss_and_one_that_joined(tmp_path: Path) -> None:
    gate, metrics = Gate(tmp_path), MediaMetrics()
    sight = sight_of(gate, metrics)
    looking = [asyncio.create_task(sight.look([url(b"same")])) for _ in range(2)]
    await joined(metrics)
    gate.is_broken.set_result(False)
    for seen in await asyncio.gather(*looking):
        seen.close()
    (await sight.look([url(b"same")])).close()
    seen_of = {
        outcome: scraped(metrics)["trtx_embedding_cache_lookups_total", outcome]
        for outcome in ("miss", "joined", "hit")
    }
    assert seen_of == {"miss": 1, "joined": 1, "hit": 1}
    assert len(gate.seen) == 1


async def test_files_are_counted_as_they_are_fetched_and_not_their_requests(tmp_path: Path) -> None:
    gate, metrics = Gate(tmp_path), MediaMetrics()
    gate.is_broken.set_result(False)
    sight = sight_of(gate, metrics)
    for count in (3, 2):
        (await sight.look([url(bytes([count, place])) for place in range(count)])).close()
    told = scraped(metrics)
    assert told["trtx_media_pictures_total", "fetch"] == told["trtx_media_pictures_total", "put"] == 5
    assert told["trtx_media_seconds_total", "fetch"] > 0


@pytest.mark.parametrize(
    ("lost", "in_files"),
    [(EmbeddingUnreachable("it can't be opened"), True), (EmbeddingGone("it died"), False)],
)
async def test_an_embedding_that_its_device_keeps_from_the_engine_is_made_again(
    tmp_path: Path, lost: Exception, in_files: bool
) -> None:
    class Far(Gate):
        """An engine that can't take the first embedding from where it is."""

        told, puts = False, 0

        def use_files(self) -> None:
            self.told = True

        async def put_embedding(self, key: bytes, rows: Any) -> None:
            self.puts += 1
            if self.puts == 1:
                raise lost

    gate, metrics = Far(tmp_path), MediaMetrics()
    gate.is_broken.set_result(False)
    seen = await sight_of(gate, metrics).look([url(b"one")])
    assert (gate.puts, len(gate.seen), gate.told) == (2, 2, in_files)
    assert not [*tmp_path.iterdir()], "both files are gone"
    seen.close()


async def test_one_that_is_lost_twice_is_that_requests_failure(tmp_path: Path) -> None:
    class Lost(Gate):
        async def put_embedding(self, key: bytes, rows: Any) -> None:
            raise EmbeddingGone("the encoder died")

    gate, metrics = Lost(tmp_path), MediaMetrics()
    gate.is_broken.set_result(False)
    with pytest.raises(NotMade, match="the encoder died"):
        await sight_of(gate, metrics).look([url(b"one")])
    assert len(gate.seen) == 2 and not [*tmp_path.iterdir()]
