"""Who asks encode workers: what ends before they give up, who is asked next, and workers of another release."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import picture_files as files
import pytest
from PIL import Image
from processes import freeze

from trtx.engine.api import SharedTensor, TowerOutput, share
from trtx.errors import LaunchError
from trtx.media import Blob, MediaError, MediaLimits, PicturePool, Stopping
from trtx.torch_engine.embeddings import EmbeddingExports
from trtx.worker.multimodal import encode_rpc as questions
from trtx.worker.multimodal import remote_embedder
from trtx.worker.multimodal.embedders import Embedder, LocalEmbedder, NoEncoder, StartedEmbedder
from trtx.worker.multimodal.embedding_cache import EmbeddingCache
from trtx.worker.multimodal.embedding_encoder import EmbeddingEncoder, discard
from trtx.worker.multimodal.encode_endpoint import ASKED
from trtx.worker.multimodal.media_metrics import MediaMetrics
from trtx.worker.multimodal.remote_embedder import RemoteEmbedder, encode_seconds
from trtx.worker.requests.invalid_request import InvalidRequest

PICTURE = Blob(files.saved(Image.fromarray(files.drawing()), "PNG"), "a picture")
KEY, ROOM = b"k" * 32, 1000

Answer = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]


@pytest.fixture(autouse=True)
def one_scratch_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all processes of a topology."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


class Workers:
    """Encode workers by id, asked without Dynamo between. ``asked`` has their ids in order."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = answers
        self.asked: list[int] = []

    def ids(self) -> Sequence[int]:
        return range(len(self._answers))

    async def ask(self, worker_id: int, question: Mapping[str, Any]) -> Mapping[str, Any]:
        self.asked.append(worker_id)
        return await self._answers[worker_id](question)


def answers_of(encoder: EmbeddingEncoder) -> Answer:
    async def answer(question: Mapping[str, Any]) -> Mapping[str, Any]:
        found: Mapping[str, Any] = (await encoder.encode({"extra_args": {ASKED: question}}))["encoder_result"]
        return found

    return answer


def encode_worker(embedder: Embedder) -> Answer:
    return answers_of(EmbeddingEncoder(embedder, EmbeddingCache(1 << 20, discard), 1 << 10, EmbeddingExports()))


class Own:
    """An embedder of three rows, whatever it gets."""

    async def embed(self, blob: Blob, key: bytes, most_rows: int) -> TowerOutput:
        return TowerOutput(share(np.zeros((3, 4), np.float32)), None)

    async def count(self, blob: Blob, key: bytes) -> int | None:
        return 3

    def use_files(self) -> None: ...

    async def close(self) -> None: ...


def asker(workers: Workers, fallback: Embedder | None = None, limits: MediaLimits | None = None) -> RemoteEmbedder:
    seconds = encode_seconds(limits or MediaLimits())
    return RemoteEmbedder(workers, MediaMetrics(), fallback=fallback, seconds=seconds)


@pytest.fixture
async def pool() -> AsyncIterator[PicturePool]:
    """Of which a file may compute for half a second, and take three by the clock."""
    async with PicturePool(None, SHORT) as started:
        yield started


SHORT = MediaLimits(decode_processes=1, decode_timeout_s=0.5)


class Decoding(Own):
    """Decodes, and encodes nothing: what a worker says of a picture that its decoders have."""

    def __init__(self, pool: PicturePool) -> None:
        self._pool = pool

    async def embed(self, blob: Blob, key: bytes, most_rows: int) -> TowerOutput:
        await self._pool.rgb(blob)
        return await super().embed(blob, key, most_rows)


async def test_decoding_says_why_it_came_to_nothing_before_the_one_who_asked_gives_up(
    pool: PicturePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is told that the machine is busy; the picture is not begun anew on the same cores."""
    monkeypatch.setattr(remote_embedder, "ENCODE_SECONDS", 1.0)
    freeze(*pool.pids)
    workers = Workers(encode_worker(Decoding(pool)))
    with pytest.raises(MediaError, match="a picture was not decoded after 3 s.*too busy; try again") as refused:
        await asker(workers, Own(), SHORT).embed(PICTURE, KEY, ROOM)
    assert (refused.value.status, workers.asked) == (429, [0])


async def test_who_stops_with_a_picture_in_hand_leaves_it_to_another(pool: PicturePool) -> None:
    stopping = encode_worker(Decoding(pool))
    await pool.close()
    for workers, fallback in ((Workers(stopping, stopping), Own()), (Workers(stopping, encode_worker(Own())), None)):
        made = await asker(workers, fallback).embed(PICTURE, KEY, ROOM)
        assert made.rows.shape == (3, 4)
    with pytest.raises(Stopping):
        await pool.rgb(PICTURE)


async def test_an_encode_worker_of_an_older_release_refuses_no_picture(caplog: pytest.LogCaptureFixture) -> None:
    """One from before questions of counts took them for pictures of a context without any room."""

    async def older(question: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"error": "[this picture] makes 3 tokens of the prompt, and the context holds 0", "status": 413}

    assert await asker(Workers(older), Own()).count(PICTURE, KEY) is None
    assert (await asker(Workers(older), Own()).embed(PICTURE, KEY, ROOM)).rows.shape == (3, 4)
    assert "run one release of trtx and one engine in all workers" in caplog.text
    with pytest.raises(NoEncoder, match="one release of trtx"):
        await asker(Workers(older)).embed(PICTURE, KEY, ROOM)


@pytest.mark.parametrize("contract", [None, "trtx-pictures/1", "trtx-prompts/2"])
async def test_a_question_of_another_release_is_answered_with_that_sentence(contract: str | None) -> None:
    question = questions.question(SharedTensor("/nowhere", "uint8", (1,)), KEY, "image", ROOM)
    question = {name: value for name, value in question.items() if name != "contract"}
    if contract is not None:
        question["contract"] = contract
    with pytest.raises(InvalidRequest, match="expected trtx-pictures/2; run one release of trtx and one engine"):
        await encode_worker(Own())(question)


async def test_a_vision_encoder_that_can_not_be_started_is_worth_another_try() -> None:
    async def begin() -> LocalEmbedder:
        raise LaunchError("a process that decodes images did not start (exit code None); see the log")

    embedder = StartedEmbedder(begin)
    with pytest.raises(NoEncoder, match="the worker could not start a vision encoder for this image; try again"):
        await embedder.embed(PICTURE, KEY, ROOM)
    with pytest.raises(LaunchError):  # at a worker's own start it is what keeps it from starting
        await embedder.start()
