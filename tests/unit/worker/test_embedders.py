"""Encode workers asked by others: spread, asked again elsewhere, and done without; no file stays."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtx.engine.api import SharedTensor, TowerOutput, read_shared, remove_shared, share
from trtx.media import Blob, MediaError
from trtx.torch_engine.embeddings import EmbeddingExports, EmbeddingMismatch
from trtx.worker.embedders import Embedder, NoEncoder, RemoteEmbedder, question, read_answer
from trtx.worker.embedding_cache import EmbeddingCache
from trtx.worker.encode_endpoint import ASKED
from trtx.worker.media_metrics import MediaMetrics
from trtx.worker.picture_encoder import PictureEncoder, discard
from trtx.worker.request import InvalidRequest


class Tower:
    """An embedder whose rows are a picture's own bytes, four to a row."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.seen: list[bytes] = []

    async def embed(self, blob: Blob, key: bytes) -> TowerOutput:
        self.seen.append(blob.data)
        if blob.data.startswith(b"bad"):
            raise MediaError(422, f"{blob.label} is broken")
        rows = np.frombuffer(blob.data, np.uint8).astype(np.float32).reshape(-1, 4)
        return TowerOutput(share(rows, self._directory), (1, 1, len(rows)))

    async def close(self) -> None: ...


@pytest.fixture(autouse=True)
def one_scratch_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all processes of a topology."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


class Workers:
    """Encode workers by id, each of which answers or does what a broken one does."""

    def __init__(self, **workers: PictureEncoder | Callable[[], Awaitable[Any]]) -> None:
        self._workers = workers
        self.asked: list[str] = []

    def ids(self) -> Sequence[int]:
        return range(len(self._workers))

    async def ask(self, worker_id: int, question: Mapping[str, Any]) -> Mapping[str, Any]:
        name = [*self._workers][worker_id]
        self.asked.append(name)
        worker = self._workers[name]
        if not isinstance(worker, PictureEncoder):
            result: Mapping[str, Any] = await worker()
            return result
        answered: Mapping[str, Any] = (await worker.encode({"extra_args": {ASKED: question}}))["encoder_result"]
        return answered


def encode_worker(tower: Tower, exports: EmbeddingExports | None = None) -> PictureEncoder:
    return PictureEncoder(tower, EmbeddingCache(1 << 20, discard), 1 << 10, exports or EmbeddingExports())


def remote(workers: Workers, directory: Path, *, fallback: Embedder | None = None, seconds: float = 60) -> Any:
    def shared(value: Any) -> SharedTensor:
        return share(value, directory)

    return RemoteEmbedder(workers, MediaMetrics(), fallback=fallback, seconds=seconds, share_bytes=shared)


PICTURE = Blob(bytes(range(8)), "a picture")
KEY = b"k" * 32


def rows_of(output: TowerOutput) -> list[list[float]]:
    """And the file is gone, as with whoever asked for it."""
    values = np.frombuffer(read_shared(output.rows), np.float32).reshape(output.rows.shape).tolist()
    remove_shared(output.rows)
    return list(values)


def files(directory: Path) -> int:
    return len([*directory.iterdir()])


def test_an_embedding_comes_from_an_encode_worker_which_keeps_one_of_its_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        tower = Tower(tmp_path)
        embedder = remote(Workers(one=encode_worker(tower)), tmp_path)
        for _ in range(2):
            made = await embedder.embed(PICTURE, KEY)
            assert made.grid == (1, 1, 2)
            assert rows_of(made) == [[0, 1, 2, 3], [4, 5, 6, 7]]
            assert files(tmp_path) == 1, "the encode worker's"
        assert tower.seen == [PICTURE.data], "the second one was cached"

    asyncio.run(scenario())


def test_an_answer_that_nobody_reads_goes_at_its_deadline_and_one_for_another_picture_is_none(tmp_path: Path) -> None:
    async def scenario() -> None:
        now = 1000.0
        exports = EmbeddingExports(lease_s=5, clock=lambda: now)
        worker = encode_worker(Tower(tmp_path), exports)
        asked = question(picture := share(np.frombuffer(PICTURE.data, np.uint8)), KEY, "a picture")
        answered = (await worker.encode({"extra_args": {ASKED: asked}}))["encoder_result"]
        remove_shared(picture)
        assert read_answer(answered, KEY).tensor_size == (2, 4)
        with pytest.raises(EmbeddingMismatch, match="another picture's"):
            read_answer(answered, b"x" * 32)
        exports.sweep()
        assert (files(tmp_path), exports.leases) == (2, 1), "the cache's own, and a second name of it"
        now += 6
        exports.sweep()
        assert (files(tmp_path), exports.leases, exports.expired) == (1, 0, 1)
        exports.close()

    asyncio.run(scenario())


def test_the_worker_that_has_the_least_to_do_is_asked(tmp_path: Path) -> None:
    async def scenario() -> None:
        answer = asyncio.Event()
        tower = Tower(tmp_path)

        async def slow() -> Any:
            await answer.wait()
            raise ConnectionError

        workers = Workers(slow=slow, quick=encode_worker(tower))
        embedder = remote(workers, tmp_path)
        first = asyncio.create_task(embedder.embed(PICTURE, KEY))
        while workers.asked != ["slow"]:
            await asyncio.sleep(0.001)
        await embedder.embed(PICTURE, KEY)
        assert workers.asked == ["slow", "quick"]
        answer.set()
        assert rows_of(await first)
        assert workers.asked == ["slow", "quick", "quick"]

    asyncio.run(scenario())


async def _gone() -> Any:
    raise ConnectionRefusedError


async def _silent() -> Any:
    await asyncio.Event().wait()


async def _confused() -> Any:
    return {"rows": "none"}


@pytest.mark.parametrize("broken", [_gone, _silent, _confused])
def test_whoever_does_not_answer_is_passed_over(broken: Callable[[], Awaitable[Any]], tmp_path: Path) -> None:
    async def scenario() -> None:
        workers = Workers(broken=broken, whole=encode_worker(Tower(tmp_path)))
        embedder = remote(workers, tmp_path, seconds=3.0)
        assert rows_of(await embedder.embed(PICTURE, KEY))
        assert workers.asked == ["broken", "whole"]
        assert embedder._metrics.retries == 1

    asyncio.run(scenario())


def test_with_no_encode_worker_left_this_worker_encodes_or_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        own = Tower(tmp_path)
        for workers in (Workers(), Workers(one=_gone, two=_gone)):
            made = await remote(workers, tmp_path, fallback=own).embed(PICTURE, KEY)
            assert rows_of(made) == [[0, 1, 2, 3], [4, 5, 6, 7]]
            with pytest.raises(NoEncoder, match="no encode worker answered; try again"):
                await remote(workers, tmp_path).embed(PICTURE, KEY)
        assert len(own.seen) == 2
        assert files(tmp_path) == 0

    asyncio.run(scenario())


def test_a_picture_that_is_none_is_refused_by_the_first_and_asked_of_no_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        own = Tower(tmp_path)
        workers = Workers(one=encode_worker(Tower(tmp_path)), two=encode_worker(Tower(tmp_path)))
        with pytest.raises(MediaError, match="a file is broken") as refused:
            await remote(workers, tmp_path, fallback=own).embed(Blob(b"bad.", "a file"), KEY)
        assert (refused.value.status, workers.asked, own.seen) == (422, ["one"], [])
        assert files(tmp_path) == 0

    asyncio.run(scenario())


def test_a_cancelled_question_leaves_no_file(tmp_path: Path) -> None:
    async def scenario() -> None:
        workers = Workers(silent=_silent)
        asking = asyncio.create_task(remote(workers, tmp_path, fallback=Tower(tmp_path)).embed(PICTURE, KEY))
        while not workers.asked:
            await asyncio.sleep(0.001)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert files(tmp_path) == 0

    asyncio.run(scenario())


def test_an_answer_that_nobody_waits_for_any_more_leaves_no_file(tmp_path: Path) -> None:
    async def scenario() -> None:
        encoder = encode_worker(Tower(tmp_path))
        asked = question(share(np.frombuffer(PICTURE.data, np.uint8), tmp_path), KEY, PICTURE.label)
        for is_wanted, count in ((False, 2), (True, 3)):  # the picture, what the worker keeps, what it lends
            await encoder.encode({"extra_args": {ASKED: asked}}, is_wanted=lambda: is_wanted)  # noqa: B023
            assert files(tmp_path) == count

    asyncio.run(scenario())


@pytest.mark.parametrize("asked", [None, {}, {"picture": ["/etc/passwd"], "key": "00", "label": "x"}, "text"])
def test_what_is_no_question_of_a_worker_is_refused(asked: Any, tmp_path: Path) -> None:
    wire = {"token_ids": [1], "extra_args": {ASKED: asked}}
    with pytest.raises(InvalidRequest, match="an encode worker answers other workers of trtx alone"):
        asyncio.run(encode_worker(Tower(tmp_path)).encode(wire))
