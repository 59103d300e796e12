"""Several requests that look at one picture: made once, counted by picture, and refused to each by its own name."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dynamo.llm.exceptions import HttpError
from prometheus_client import CollectorRegistry

from trtx.checkpoint.vision import VisionConfig
from trtx.engine.api import EmbeddingGone, EmbeddingUnreachable, EngineFacts, TowerOutput, share
from trtx.media import THIS_PICTURE, Blob, MediaError, MediaLimits
from trtx.media.blob import label_of
from trtx.worker.multimodal.embedding_cache import EmbeddingCache, NotMade
from trtx.worker.multimodal.images import Picture, Sent
from trtx.worker.multimodal.media_loader import FETCHES, MediaLoader
from trtx.worker.multimodal.media_metrics import MediaMetrics
from trtx.worker.requests.faults import as_dynamo_error
from trtx.worker.requests.invalid_request import InvalidRequest

pytestmark = pytest.mark.slow

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

    async def count(self, blob: Blob, key: bytes) -> int | None:
        return int(blob.data) or None

    async def put_embedding(self, key: bytes, rows: Any) -> None: ...

    async def close(self) -> None: ...


def loader_of(
    gate: Gate, metrics: MediaMetrics, limits: MediaLimits | None = None, config: VisionConfig = CONFIG
) -> MediaLoader:
    metrics.cache = EmbeddingCache[Picture](1 << 20, lambda key, picture: None)
    engine: Any = gate
    return MediaLoader(
        config, engine, gate, cache=metrics.cache, limits=limits or MediaLimits(), metrics=metrics, model="model",
        options={"image": "options", "embedding": "options"},
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
    loader = loader_of(gate, metrics)
    urls = [url(b"same", f"image/{client}") for client in ("alice", "robert")]
    looking = [asyncio.create_task(loader.load([one])) for one in urls]
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
    loader = loader_of(gate, metrics)
    urls = [url(b"one", "image/a"), url(b"other", "image/bb")]
    with pytest.raises(MediaError, match="data:image/a URL of"):
        await loader.load(urls)
    with pytest.raises(MediaError, match="data:image/bb URL of"):
        await loader.load(urls[::-1])


def wire(*sent: Sent, beside: int) -> dict[str, Any]:
    """A request with so many tokens beside the placeholders."""
    media = {"image_url": [{"Url": one.url} for one in sent]}
    return {"token_ids": [1] * beside + [9] * len(sent), "multi_modal_data": media}


async def test_pictures_of_a_fixed_size_that_the_context_does_not_hold_are_not_even_fetched(tmp_path: Path) -> None:
    gate, metrics = Gate(tmp_path), MediaMetrics()
    loader = loader_of(gate, metrics, MediaLimits(max_images=99))
    nowhere = Sent("https://192.0.2.1/nothing.png")
    assert loader.media_of(wire(*[nowhere] * 49, beside=1)) is not None, "99 of 100: one is left for the answer"
    with pytest.raises(InvalidRequest, match="the prompt has 100 tokens and the context holds 100"):
        loader.media_of(wire(*[nowhere] * 49, beside=2))


async def test_pictures_that_only_together_are_more_than_the_context_are_refused_unencoded(tmp_path: Path) -> None:
    gate, metrics = Gate(tmp_path), MediaMetrics()
    by_grid = replace(CONFIG, tokens_per_image=None)
    loader = loader_of(gate, metrics, config=by_grid)
    gate.is_broken.set_result(False)

    async def look(*rows: bytes, beside: int = 1) -> None:
        looking = loader.media_of(wire(*map(url, rows), beside=beside))
        assert looking is not None
        await looking.pictures()
        looking.close()

    for rows in ((b"50", b"49"), (b"33", b"32", b"34"), (b"98", b"0")):  # 0: its header does not tell; one at least
        with pytest.raises(InvalidRequest, match="the prompt has 100 tokens and the context holds 100"):
            await look(*rows)
    with pytest.raises(InvalidRequest, match="the prompt has 101 tokens"):
        await look(b"50", b"50")  # one picture twice: encoded once, it stands in the prompt twice
    assert gate.seen == []
    await look(b"49", b"49")
    await look(b"49", b"47", beside=50)  # the first is held, with the two rows that were made of it: 99


async def test_two_requests_of_one_picture_at_a_time_are_a_miss_and_one_that_joined(tmp_path: Path) -> None:
    gate, metrics = Gate(tmp_path), MediaMetrics()
    loader = loader_of(gate, metrics)
    looking = [asyncio.create_task(loader.load([url(b"same")])) for _ in range(2)]
    await joined(metrics)
    gate.is_broken.set_result(False)
    for seen in await asyncio.gather(*looking):
        seen.close()
    (await loader.load([url(b"same")])).close()
    seen_of = {
        outcome: scraped(metrics)["trtx_embedding_cache_lookups_total", outcome]
        for outcome in ("miss", "joined", "hit")
    }
    assert seen_of == {"miss": 1, "joined": 1, "hit": 1}
    assert len(gate.seen) == 1


async def test_servers_that_never_answer_hold_up_no_picture_that_came_with_its_request(tmp_path: Path) -> None:
    gate, metrics = Gate(tmp_path), MediaMetrics()
    gate.is_broken.set_result(False)
    connected = asyncio.Semaphore(0)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.release()
        await reader.read()  # until whoever asked has gone
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    limits = MediaLimits(allow_http_media=True, allow_private_media=True, media_timeout_s=600, media_idle_s=600)
    loader = loader_of(gate, metrics, limits)
    port = server.sockets[0].getsockname()[1]
    waiting = [asyncio.create_task(loader.load([Sent(f"http://127.0.0.1:{port}/{one}")])) for one in range(FETCHES + 1)]
    async with asyncio.timeout(60):
        for _ in range(FETCHES):
            await connected.acquire()
        (await loader.load([url(b"inline")])).close()
    assert [blob.data for blob in gate.seen] == [b"inline"]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    server.close()


async def test_files_are_counted_as_they_are_fetched_and_not_their_requests(tmp_path: Path) -> None:
    gate, metrics = Gate(tmp_path), MediaMetrics()
    gate.is_broken.set_result(False)
    loader = loader_of(gate, metrics)
    for count in (3, 2):
        (await loader.load([url(bytes([count, place])) for place in range(count)])).close()
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
    seen = await loader_of(gate, metrics).load([url(b"one")])
    assert (gate.puts, len(gate.seen), gate.told) == (2, 2, in_files)
    assert not [*tmp_path.iterdir()], "both files are gone"
    seen.close()


async def test_one_that_is_lost_twice_is_that_requests_failure(tmp_path: Path) -> None:
    class Lost(Gate):
        async def put_embedding(self, key: bytes, rows: Any) -> None:
            raise EmbeddingGone("the encoder died")

    gate, metrics = Lost(tmp_path), MediaMetrics()
    gate.is_broken.set_result(False)
    with pytest.raises(NotMade, match="lost before the engine had read it; try again") as failed:
        await loader_of(gate, metrics).load([url(b"one")])
    told = as_dynamo_error(failed.value, "refused", "agg")
    assert isinstance(told, HttpError) and told.code == 429, "no fault of the picture's, nor of the engine's"
    assert len(gate.seen) == 2 and not [*tmp_path.iterdir()]


async def test_a_burst_of_requests_counts_no_more_pictures_at_a_time_than_there_are_decoders(tmp_path: Path) -> None:
    class Counting(Gate):
        under_way, most = 0, 0

        async def count(self, blob: Blob, key: bytes) -> int | None:
            assert blob.kind == "image", "nobody counts another kind"
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            await asyncio.sleep(0)
            self.under_way -= 1
            return 1

    gate, metrics = Counting(tmp_path), MediaMetrics()
    gate.is_broken.set_result(False)
    loader = loader_of(gate, metrics, MediaLimits(decode_processes=2), replace(CONFIG, tokens_per_image=None))
    embedding = Sent(url(b"an embedding").url, "embedding")
    for seen in await asyncio.gather(
        *(loader.load([url(b"%d" % n), embedding, url(b"%d" % -n)]) for n in range(1, 40))
    ):
        seen.close()
    assert gate.most == 2


async def test_pictures_that_are_held_wait_for_no_other_requests_counts(tmp_path: Path) -> None:
    """Nor is one counted that was made while it waited for its turn."""

    class Slow(Gate):
        counted: list[bytes]
        may_go_on: asyncio.Event

        async def count(self, blob: Blob, key: bytes) -> int | None:
            self.counted.append(blob.data)
            await self.may_go_on.wait()
            return 1

    async def look(*sent: bytes) -> None:
        (await loader.load([url(data) for data in sent])).close()

    gate, metrics = Slow(tmp_path), MediaMetrics()
    gate.is_broken.set_result(False)
    gate.counted, gate.may_go_on = [], asyncio.Event()
    loader = loader_of(gate, metrics, MediaLimits(decode_processes=2), replace(CONFIG, tokens_per_image=None))
    async with asyncio.timeout(60):
        for data in (b"one", b"two"):
            await look(data)
        others = asyncio.create_task(look(b"slow", b"slower"))
        waiting = asyncio.create_task(look(b"one", b"three"))
        while len(gate.counted) < 2 or scraped(metrics)["trtx_media_pictures_total", "fetch"] < 6:
            await asyncio.sleep(0.001)
        await look(b"one", b"two")
        (await loader.load([url(b"one"), Sent(url(b"an embedding").url, "embedding")])).close()
        await look(b"three")
        gate.may_go_on.set()
        await asyncio.gather(others, waiting)
    assert sorted(gate.counted) == [b"slow", b"slower"]
