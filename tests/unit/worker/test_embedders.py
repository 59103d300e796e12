"""Encode workers asked by others: one for each picture, another where it fails, and done without; no file stays."""

from __future__ import annotations

import asyncio
import io
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save

from trtx.checkpoint import resolve_checkpoint
from trtx.checkpoint.vision import VisionConfig, read_vision_config
from trtx.engine.api import Engine, EngineFacts, SharedTensor, TowerOutput, read_shared, remove_shared, share
from trtx.media import Blob, MediaError, MediaLimits, PicturePool
from trtx.torch_engine.embeddings import EmbeddingExports, EmbeddingMismatch
from trtx.worker.multimodal.embedders import Embedder, LocalEmbedder, NoEncoder, StartedEmbedder
from trtx.worker.multimodal.embedding_cache import EmbeddingCache
from trtx.worker.multimodal.embedding_encoder import EmbeddingEncoder, discard
from trtx.worker.multimodal.encode_endpoint import ASKED
from trtx.worker.multimodal.encode_rpc import is_refusal, question, read_answer
from trtx.worker.multimodal.media_metrics import MediaMetrics
from trtx.worker.multimodal.remote_embedder import DISTRUST_SECONDS, RemoteEmbedder, preferred
from trtx.worker.requests.invalid_request import InvalidRequest

pytestmark = pytest.mark.slow


class Tower:
    """An embedder whose rows are a picture's own bytes, four to a row."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.seen: list[bytes] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def embed(self, blob: Blob, key: bytes, most_rows: int) -> TowerOutput:
        self.seen.append(blob.data)
        await self.may_go_on.wait()
        if blob.data.startswith(b"bad"):
            raise MediaError(422, f"{blob.label} is broken")
        rows = np.frombuffer(blob.data, np.uint8).astype(np.float32).reshape(-1, 4)
        return TowerOutput(share(rows, self._directory), (1, 1, len(rows)))

    async def count(self, blob: Blob, key: bytes) -> int | None:
        if blob.data.startswith(b"bad"):
            raise MediaError(422, f"{blob.label} is broken")
        return None if blob.kind == "video" else len(blob.data) // 4

    async def close(self) -> None: ...


@pytest.fixture(autouse=True)
def one_scratch_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all processes of a topology."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


class Workers:
    """Encode workers by id, each of which answers or does what a broken one does."""

    def __init__(self, **workers: EmbeddingEncoder | Callable[[], Awaitable[Any]]) -> None:
        self._workers = workers
        self.asked: list[str] = []

    def ids(self) -> Sequence[int]:
        return range(len(self._workers))

    async def ask(self, worker_id: int, question: Mapping[str, Any]) -> Mapping[str, Any]:
        name = [*self._workers][worker_id]
        self.asked.append(name)
        worker = self._workers[name]
        if not isinstance(worker, EmbeddingEncoder):
            result: Mapping[str, Any] = await worker()
            return result
        answered: Mapping[str, Any] = (await worker.encode({"extra_args": {ASKED: question}}))["encoder_result"]
        return answered


def encode_worker(tower: Tower, exports: EmbeddingExports | None = None) -> EmbeddingEncoder:
    return EmbeddingEncoder(tower, EmbeddingCache(1 << 20, discard), 1 << 10, exports or EmbeddingExports())


def remote(
    workers: Workers,
    directory: Path,
    *,
    fallback: Embedder | None = None,
    seconds: float = 60,
    clock: Callable[[], float] = time.monotonic,
) -> Any:
    def shared(value: Any) -> SharedTensor:
        return share(value, directory)

    return RemoteEmbedder(workers, MediaMetrics(), fallback=fallback, seconds=seconds, share_bytes=shared, clock=clock)


ROOM = 1000  # rows that a context holds
PICTURE = Blob(bytes(range(8)), "a picture")
KEY = next(key for number in range(100) if preferred((0, 1), key := number.to_bytes(32)) == 0)
"""Of a picture that the first of two encode workers is asked for."""


def rows_of(output: TowerOutput) -> list[list[float]]:
    """And the file is gone, as with whoever asked for it."""
    values = np.frombuffer(read_shared(output.rows), np.float32).reshape(output.rows.shape).tolist()
    remove_shared(output.rows)
    return list(values)


def files(directory: Path) -> int:
    return len([*directory.iterdir()])


async def test_an_embedding_comes_from_an_encode_worker_which_keeps_one_of_its_own(tmp_path: Path) -> None:
    tower = Tower(tmp_path)
    embedder = remote(Workers(one=encode_worker(tower)), tmp_path)
    for _ in range(2):
        made = await embedder.embed(PICTURE, KEY, ROOM)
        assert made.grid == (1, 1, 2)
        assert rows_of(made) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert files(tmp_path) == 1, "the encode worker's"
    assert tower.seen == [PICTURE.data], "the second one was cached"


async def test_rows_are_counted_by_whoever_would_encode_and_nothing_is_encoded(tmp_path: Path) -> None:
    tower, others = Tower(tmp_path), Tower(tmp_path)

    async def silent() -> Any:
        raise ConnectionError("it has gone")

    one = remote(Workers(one=encode_worker(tower)), tmp_path)
    assert await one.count(PICTURE, KEY) == 2
    assert await one.count(Blob(PICTURE.data, "a video", "video"), KEY) is None
    with pytest.raises(MediaError, match="my own name is broken") as refused:
        await one.count(Blob(b"bad!", "my own name"), KEY)
    assert refused.value.status == 422
    assert await remote(Workers(gone=silent), tmp_path, fallback=others).count(PICTURE, KEY) is None
    assert await remote(Workers(), tmp_path, fallback=others).count(PICTURE, KEY) == 2
    assert await remote(Workers(), tmp_path).count(PICTURE, KEY) is None
    assert (tower.seen, others.seen, files(tmp_path)) == ([], [], 0)


async def test_an_answer_that_nobody_reads_goes_at_its_deadline_and_one_for_another_picture_is_none(
    tmp_path: Path,
) -> None:
    now = 1000.0
    exports = EmbeddingExports(lease_s=5, clock=lambda: now)
    worker = encode_worker(Tower(tmp_path), exports)
    asked = question(picture := share(np.frombuffer(PICTURE.data, np.uint8)), KEY, "image", ROOM)
    answered = (await worker.encode({"extra_args": {ASKED: asked}}))["encoder_result"]
    remove_shared(picture)
    assert read_answer(answered, KEY).tensor_size == (2, 4)
    with pytest.raises(EmbeddingMismatch, match="another image's"):
        read_answer(answered, b"x" * 32)
    exports.sweep()
    assert (files(tmp_path), exports.leases) == (2, 1), "the cache's own, and a second name of it"
    now += 6
    exports.sweep()
    assert (files(tmp_path), exports.leases, exports.expired) == (1, 0, 1)
    exports.close()


async def test_however_many_ask_each_picture_is_encoded_once_over_all_encode_workers(tmp_path: Path) -> None:
    towers = [Tower(tmp_path) for _ in range(2)]
    workers = Workers(one=encode_worker(towers[0]), two=encode_worker(towers[1]))
    askers = [remote(workers, tmp_path) for _ in range(3)]
    pictures = {number.to_bytes(32): Blob(number.to_bytes(8), "a picture") for number in range(24)}
    for asker in askers:  # one after the other and at once: what others have asked meanwhile changes nothing
        for made in await asyncio.gather(*(asker.embed(blob, key, ROOM) for key, blob in pictures.items())):
            remove_shared(made.rows)
    seen = [data for tower in towers for data in tower.seen]
    assert sorted(seen) == sorted(blob.data for blob in pictures.values())
    assert all(tower.seen for tower in towers)


@given(st.sets(st.integers(0, 2**64 - 1), min_size=1, max_size=8), st.binary(min_size=32, max_size=32))
def test_one_picture_has_one_order_of_workers_and_who_goes_takes_nothing_but_its_own(ids: set[int], key: bytes) -> None:
    worker = preferred(ids, key)
    assert preferred(sorted(ids), key) == preferred(sorted(ids, reverse=True), key) == worker
    for other in ids - {worker}:
        assert preferred(ids - {other}, key) == worker


@pytest.mark.parametrize("count", [2, 3, 5])
def test_pictures_spread_over_workers_about_evenly(count: int) -> None:
    spread = Counter(preferred(range(7000, 7000 + count), number.to_bytes(32)) for number in range(1000 * count))
    assert len(spread) == count and all(850 < pictures < 1150 for pictures in spread.values())


async def test_each_asker_of_a_broken_picture_reads_its_own_label_and_no_other(tmp_path: Path) -> None:
    tower = Tower(tmp_path)
    tower.may_go_on.clear()
    workers = Workers(one=encode_worker(tower))
    labels = ["file:///secret-of-alice.png", "https://bob.example/b.png"]
    asking = [asyncio.create_task(remote(workers, tmp_path).embed(Blob(b"bad.", one), KEY, ROOM)) for one in labels]
    async with asyncio.timeout(30):
        while len(workers.asked) < 2 or not tower.seen:
            await asyncio.sleep(0.001)
    tower.may_go_on.set()
    told = await asyncio.gather(*asking, return_exceptions=True)
    assert [str(one) for one in told] == [f"{label} is broken" for label in labels]
    assert tower.seen == [b"bad."], "the second one joined"


async def test_a_refusal_can_be_told_from_an_embedding(tmp_path: Path) -> None:
    encoder = encode_worker(Tower(tmp_path))
    for data, refused in ((b"bad.", True), (b"good", False)):
        asked = question(share(np.frombuffer(data, np.uint8), tmp_path), data * 8, "image", ROOM)
        answered = (await encoder.encode({"extra_args": {ASKED: asked}}))["encoder_result"]
        assert is_refusal(answered) is refused


async def _gone() -> Any:
    raise ConnectionRefusedError


async def _silent() -> Any:
    await asyncio.Event().wait()


async def _confused() -> Any:
    return {"rows": "none"}


@pytest.mark.parametrize("broken", [_gone, _silent, _confused])
async def test_whoever_does_not_answer_is_passed_over(broken: Callable[[], Awaitable[Any]], tmp_path: Path) -> None:
    workers = Workers(broken=broken, whole=encode_worker(Tower(tmp_path)))
    embedder = remote(workers, tmp_path, seconds=3.0)
    assert rows_of(await embedder.embed(PICTURE, KEY, ROOM))
    assert workers.asked == ["broken", "whole"]
    assert embedder._metrics.retries == 1


async def test_whoever_did_not_answer_is_asked_last_for_a_while(tmp_path: Path) -> None:
    now = 100.0
    workers = Workers(broken=_gone, whole=encode_worker(Tower(tmp_path)))
    embedder = remote(workers, tmp_path, clock=lambda: now)
    for _ in range(3):
        rows_of(await embedder.embed(PICTURE, KEY, ROOM))
    assert workers.asked == ["broken", "whole", "whole", "whole"]
    assert embedder._metrics.retries == 1
    now += DISTRUST_SECONDS + 1
    rows_of(await embedder.embed(PICTURE, KEY, ROOM))
    assert workers.asked[4:] == ["broken", "whole"]


async def test_the_only_one_is_asked_again_unless_this_worker_can_encode(tmp_path: Path) -> None:
    alone, beside = Workers(one=_gone), Workers(one=_gone)
    embedder = remote(alone, tmp_path)
    for _ in range(2):
        with pytest.raises(NoEncoder):
            await embedder.embed(PICTURE, KEY, ROOM)
    assert alone.asked == ["one", "one"]
    embedder = remote(beside, tmp_path, fallback=Tower(tmp_path))
    for _ in range(2):
        rows_of(await embedder.embed(PICTURE, KEY, ROOM))
    assert beside.asked == ["one"]
    assert embedder._metrics.fallbacks == 2


class Mortal(LocalEmbedder):
    """With an encoder that dies of a picture of ``deadly`` bytes, and takes with it what is there at that time."""

    def __init__(self, tower: Tower, deadly: bytes) -> None:
        self._tower, self._deadly = tower, deadly
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.open = 0

    @property
    def is_alive(self) -> bool:
        return not self._end.done()

    async def embed(self, blob: Blob, key: bytes, most_rows: int) -> TowerOutput:
        self.open += 1
        made = asyncio.ensure_future(self._tower.embed(blob, key, most_rows))
        if blob.data == self._deadly:
            await self._tower.may_go_on.wait()
            self._end.set_result(None)
        await asyncio.wait((made, self._end), return_when=asyncio.FIRST_COMPLETED)
        if self._end.done():
            made.cancel()
            raise RuntimeError("encoder process died")
        return made.result()

    async def close(self) -> None: ...


async def test_what_was_with_an_encoder_that_died_goes_to_the_next_one_and_what_ended_it_alone_is_told(
    tmp_path: Path,
) -> None:
    tower = Tower(tmp_path)
    begun: list[Mortal] = []

    async def begin() -> LocalEmbedder:
        begun.append(Mortal(tower, b"deadly.."))
        return begun[-1]

    embedder = StartedEmbedder(begin)
    tower.may_go_on.clear()
    pictures = [Blob(data, "a picture") for data in (b"one.....", b"deadly..", b"another.", b"bad.")]
    asking = [asyncio.create_task(embedder.embed(blob, KEY, ROOM)) for blob in pictures]
    async with asyncio.timeout(30):
        while not begun or begun[0].open < len(pictures):
            await asyncio.sleep(0.001)
    tower.may_go_on.set()
    told = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(one) for one in told] == [TowerOutput, NoEncoder, TowerOutput, MediaError]
    assert "two vision encoders died while they encoded this image; try again" in str(told[1])
    assert rows_of(await embedder.embed(PICTURE, KEY, ROOM)), "a third one is there for whoever comes"
    assert len(begun) == 3


async def test_an_encode_worker_that_does_not_count_is_not_asked_for_each_picture(tmp_path: Path) -> None:
    workers = Workers(broken=_gone)
    embedder = remote(workers, tmp_path, fallback=Tower(tmp_path))
    assert await embedder.count(PICTURE, KEY) is None, "nobody waits for more"
    assert [await embedder.count(PICTURE, KEY) for _ in range(3)] == [2, 2, 2]
    assert rows_of(await embedder.embed(PICTURE, KEY, ROOM))
    assert workers.asked == ["broken"]


async def test_a_count_that_was_with_an_encoder_that_died_refuses_nothing(tmp_path: Path) -> None:
    class Ending(Mortal):
        async def count(self, blob: Blob, key: bytes) -> int | None:
            self._end.set_result(None)
            raise MediaError(429, "the worker that was to decode the image is stopping; try again")

    async def begin() -> LocalEmbedder:
        return Ending(Tower(tmp_path), b"")

    embedder = StartedEmbedder(begin)
    assert await embedder.count(PICTURE, KEY) is None
    assert rows_of(await embedder.embed(PICTURE, KEY, ROOM))


async def test_a_picture_that_is_refused_starts_no_other_encoder(tmp_path: Path) -> None:
    begun: list[Mortal] = []

    async def begin() -> LocalEmbedder:
        begun.append(Mortal(Tower(tmp_path), b""))
        return begun[-1]

    embedder = StartedEmbedder(begin)
    with pytest.raises(MediaError, match="a file is broken"):
        await embedder.embed(Blob(b"bad.", "a file"), KEY, ROOM)
    await embedder.close()
    assert len(begun) == 1


async def test_with_no_encode_worker_left_this_worker_encodes_or_says_so(tmp_path: Path) -> None:
    own = Tower(tmp_path)
    for workers in (Workers(), Workers(one=_gone, two=_gone)):
        made = await remote(workers, tmp_path, fallback=own).embed(PICTURE, KEY, ROOM)
        assert rows_of(made) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(NoEncoder, match="no encode worker answered; try again"):
            await remote(workers, tmp_path).embed(PICTURE, KEY, ROOM)
    assert len(own.seen) == 2
    assert files(tmp_path) == 0


async def test_a_picture_that_is_none_is_refused_by_the_first_and_asked_of_no_other(tmp_path: Path) -> None:
    own = Tower(tmp_path)
    workers = Workers(one=encode_worker(Tower(tmp_path)), two=encode_worker(Tower(tmp_path)))
    with pytest.raises(MediaError, match="a file is broken") as refused:
        await remote(workers, tmp_path, fallback=own).embed(Blob(b"bad.", "a file"), KEY, ROOM)
    assert (refused.value.status, workers.asked, own.seen) == (422, ["one"], [])
    assert files(tmp_path) == 0


async def test_a_cancelled_question_leaves_no_file(tmp_path: Path) -> None:
    workers = Workers(silent=_silent)
    asking = asyncio.create_task(remote(workers, tmp_path, fallback=Tower(tmp_path)).embed(PICTURE, KEY, ROOM))
    while not workers.asked:
        await asyncio.sleep(0.001)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert files(tmp_path) == 0


@pytest.mark.parametrize("asks", ["embed", "count"])
async def test_a_question_that_is_cancelled_while_its_file_is_written_leaves_none(tmp_path: Path, asks: str) -> None:
    begun, may_go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def written(value: Any) -> SharedTensor:
        begun.set()
        assert may_go_on.wait(60)
        try:
            return share(value, tmp_path)
        finally:
            ended.set()

    embedder = RemoteEmbedder(Workers(silent=_silent), MediaMetrics(), fallback=None, seconds=60, share_bytes=written)
    what = embedder.embed(PICTURE, KEY, ROOM) if asks == "embed" else embedder.count(PICTURE, KEY)
    asking: asyncio.Task[Any] = asyncio.create_task(what)
    await asyncio.to_thread(begun.wait, 60)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    may_go_on.set()
    await asyncio.to_thread(ended.wait, 60)
    async with asyncio.timeout(60):
        while files(tmp_path):
            await asyncio.sleep(0.001)
    assert files(tmp_path) == 0


async def test_an_answer_that_nobody_waits_for_any_more_leaves_no_file(tmp_path: Path) -> None:
    encoder = encode_worker(Tower(tmp_path))
    asked = question(share(np.frombuffer(PICTURE.data, np.uint8), tmp_path), KEY, "video", ROOM)
    for is_wanted, count in ((False, 2), (True, 3)):  # the picture, what the worker keeps, what it lends
        await encoder.encode({"extra_args": {ASKED: asked}}, is_wanted=lambda: is_wanted)  # noqa: B023
        assert files(tmp_path) == count


@pytest.mark.parametrize("asked", [None, {}, {"picture": ["/etc/passwd"], "key": "00", "label": "x"}, "text"])
def test_what_is_no_question_of_a_worker_is_refused(asked: Any, tmp_path: Path) -> None:
    wire = {"token_ids": [1], "extra_args": {ASKED: asked}}
    with pytest.raises(InvalidRequest, match="encode workers only serve other trtx workers"):
        asyncio.run(encode_worker(Tower(tmp_path)).encode(wire))


def safetensors(rows: int, columns: int, grid: tuple[int, ...] | None) -> bytes:
    tensors = {"embedding": np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)}
    if grid is not None:
        tensors["grid_thw"] = np.array(grid, np.int64)
    return bytes(save(tensors))


QWEN = VisionConfig(
    "Qwen3VLForConditionalGeneration", hidden_size=2, image_token_id=9, tokens_per_image=None, spatial_merge=2,
    video_token_id=8, deepstack_levels=1, temporal_patch=2,
)  # fmt: skip
LLAVA = VisionConfig("LlavaForConditionalGeneration", hidden_size=4, image_token_id=9, tokens_per_image=3)


async def test_embeddings_of_clients_are_checked_against_what_the_model_makes(tmp_path: Path) -> None:
    class Encoder(Engine):
        facts = EngineFacts(context_length=100, embedding_dtype="float32")

    async with PicturePool(None, MediaLimits(decode_processes=1, decode_timeout_s=300)) as pool:

        async def sent(config: VisionConfig, rows: int, columns: int, grid: tuple[int, ...] | None) -> TowerOutput:
            embedder = LocalEmbedder(pool, Encoder(), config, MediaMetrics())
            return await embedder.embed(Blob(safetensors(rows, columns, grid), "it", "embedding"), KEY, ROOM)

        made = await sent(LLAVA, 3, 4, None)
        assert made.grid is None and rows_of(made) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        made = await sent(QWEN, 6, 4, (1, 4, 6))
        assert made.grid == (1, 2, 3) and len(rows_of(made)) == 6
        for config, rows, columns, grid, says in (
            (LLAVA, 2, 4, None, "it holds 2 rows; expected 3 without a grid_thw"),
            (LLAVA, 3, 4, (1, 2, 2), "3 rows and a grid_thw; expected 3 without a grid_thw"),
            (LLAVA, 3, 5, None, r"shape \[3, 5\]; this model expects \[rows, 4\]"),
            (QWEN, 6, 2, (1, 4, 6), r"expects \[rows, 4\]"),  # without the levels of deepstack
            (QWEN, 6, 4, None, "it holds no grid_thw; expected one"),
            (QWEN, 6, 4, (1, 2, 3), "6 rows and a grid_thw of 1 x 2 x 3; expected 1 x height x width in patches"),
            (QWEN, 6, 4, (1, 4, 4), "grid_thw of 1 x 4 x 4"),
            (QWEN, 6, 4, (3, 2, 4), "grid_thw of 3 x 2 x 4"),
        ):
            with pytest.raises(MediaError, match=says) as refused:
                await sent(config, rows, columns, grid)
            assert refused.value.status == 422
    assert files(tmp_path) == 0


async def test_who_reads_no_device_gets_files_of_its_own_from_the_same_worker(tmp_path: Path) -> None:
    """One picture, asked for by a worker whose engine reads the encoder's device, and by one whose engine can't."""
    near, far = Tower(tmp_path), Tower(tmp_path)
    worker = EmbeddingEncoder(near, EmbeddingCache(1 << 20, discard), 1 << 10, EmbeddingExports(), in_files=far)
    reads, reads_not = (remote(Workers(it=worker), tmp_path) for _ in range(2))
    reads_not.use_files()
    for asker in (reads, reads_not, reads, reads_not):
        assert rows_of(await asker.embed(PICTURE, KEY, 100)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(near.seen) == len(far.seen) == 1, "each kept by itself"


def test_a_fallback_is_told_to_use_files_too_whenever_it_is_begun(tmp_path: Path) -> None:
    class Local(Tower):
        told = 0

        def use_files(self) -> None:
            self.told += 1

    fallback = Local(tmp_path)
    remote(Workers(), tmp_path, fallback=fallback).use_files()
    assert fallback.told == 1


async def test_a_picture_of_more_rows_than_a_context_holds_is_refused_before_it_is_encoded(tmp_path: Path) -> None:
    class Encoder(Engine):
        facts = EngineFacts(context_length=100, embedding_dtype="float32")
        seen = 0

        async def encode_pixels(self, pixels: SharedTensor, grid: Any, *, on_device: bool = False) -> TowerOutput:
            self.seen += 1
            return TowerOutput(share(np.zeros((6 * 8, 2), np.float32), tmp_path), (1, 6, 8))

    model, encoder = resolve_checkpoint("synthetic:tiny-qwen2.5-vl").path, Encoder()
    Image.new("RGB", (224, 168), "red").save(file := io.BytesIO(), "PNG")  # 6 x 8 rows
    asked = share(np.frombuffer(file.getvalue(), np.uint8), tmp_path)
    async with PicturePool(model, MediaLimits(decode_processes=1, decode_timeout_s=300)) as pool:
        config = read_vision_config(model)
        assert config is not None
        cache: EmbeddingCache[TowerOutput] = EmbeddingCache(1 << 20, discard)
        local = LocalEmbedder(pool, encoder, config, MediaMetrics())
        worker = EmbeddingEncoder(local, cache, 1 << 10, EmbeddingExports())
        for room, seen in ((47, 0), (48, 1)):
            told = await worker.encode({"extra_args": {ASKED: question(asked, KEY, "image", room)}})
            assert is_refusal(told["encoder_result"]) == (room == 47)
            assert encoder.seen == seen
            if room == 47:
                assert told["encoder_result"]["status"] == 413
                assert "makes 48 tokens of the prompt, and the context holds 47" in told["encoder_result"]["error"]
