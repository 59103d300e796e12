"""Pictures for an engine that prepares them itself: who encodes, who is asked next, and what is let go of."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from trtx.checkpoint import resolve_checkpoint
from trtx.config.media import MediaLimits
from trtx.engine.api import EngineFacts, PicturePrompt, ReadyPrompt, SharedTensor, share
from trtx.media import MediaError, PicturePool
from trtx.text import load_tokenizer
from trtx.worker.multimodal.decoding import Decoding
from trtx.worker.multimodal.embedders import NoEncoder
from trtx.worker.multimodal.handle_encoder import CONTRACT
from trtx.worker.multimodal.images import Sent
from trtx.worker.multimodal.media_metrics import MediaMetrics
from trtx.worker.multimodal.prompt_media_loader import PromptMediaLoader, PromptRequestMedia
from trtx.worker.requests.invalid_request import InvalidRequest

pytestmark = pytest.mark.slow

HANDLES = {"multimodal_embedding_handles": [{"tensor_size": [2, 4]}]}
ONE = MediaLimits(decode_processes=1)
MODEL = "synthetic:tiny-qwen2.5-vl"
TEXT = "a <|image_pad|> b"


def sent(colour: str = "red", data: bytes | None = None) -> Sent:
    if data is None:
        file = io.BytesIO()
        Image.new("RGB", (6, 4), colour).save(file, "PNG")
        data = file.getvalue()
    return Sent(f"data:image/png;base64,{base64.b64encode(data).decode()}")


class Processor:
    """Stands where an engine's own processor is: what it was given, and what it was told to let go of."""

    facts = EngineFacts(context_length=64, image_token_id=7)

    def __init__(self, refuses: bool = False, counts: int | None = None) -> None:
        """``counts``: the highest picture that it takes; None: it does not say how many rows one makes."""
        self.given: list[PicturePrompt] = []
        self.dropped: list[Any] = []
        self._refuses = refuses
        self._counts = counts

    def rows_of(self, picture: Any) -> int | None:
        if self._counts is None:
            return None
        if picture.shape[0] > self._counts:
            raise ValueError("it is too high")
        return int(picture.shape[0] * picture.shape[1])

    def prepare_prompt(self, prompt: PicturePrompt) -> ReadyPrompt:
        self.given.append(prompt)
        if self._refuses:
            raise ValueError("the model's processor refuses it")
        return ReadyPrompt([*prompt.token_ids, 7], prompt, dict(prompt.handles))

    def drop_handles(self, handles: Mapping[str, Any]) -> None:
        self.dropped.append(handles)

    def drop_prompt(self, prompt: ReadyPrompt) -> None:
        self.dropped.append(prompt)


class Encoders:
    """Encode workers by id, each with its answer, or the exception that asking it ends with."""

    def __init__(self, answers: Mapping[int, Mapping[str, Any] | Exception]) -> None:
        self._answers = answers
        self.asked: list[tuple[int, Mapping[str, Any]]] = []

    def ids(self) -> Sequence[int]:
        return list(self._answers)

    async def ask(self, worker_id: int, question: Mapping[str, Any]) -> Mapping[str, Any]:
        self.asked.append((worker_id, question))
        answer = self._answers[worker_id]
        if isinstance(answer, Exception):
            raise answer
        return CONTRACT.marked(answer)


Make = Callable[..., PromptMediaLoader]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    async with PicturePool(None, ONE) as pool:
        tokenizer = load_tokenizer(resolve_checkpoint(MODEL).path)

        def loader_of(engine: Any, workers: Encoders | None = None, **more: Any) -> PromptMediaLoader:
            metrics = MediaMetrics()
            started = Decoding(pool, metrics)
            started._starting = asyncio.ensure_future(asyncio.sleep(0))
            return PromptMediaLoader(
                engine, started, tokenizer=tokenizer, workers=workers, limits=ONE, metrics=metrics, **more
            )

        yield loader_of


def tokens() -> list[int]:
    return list(load_tokenizer(resolve_checkpoint(MODEL).path).encode(TEXT).ids)


async def test_without_encode_workers_the_engine_gets_the_pixels(make: Make) -> None:
    engine = Processor()
    ready = await make(engine).load(tokens(), [sent()])
    (prompt,) = engine.given
    (picture,) = prompt.pictures
    assert (picture.shape, picture[0, 0].tolist()) == ((4, 6, 3), [255, 0, 0])
    assert (prompt.token_ids, prompt.handles) == (tokens(), {})
    assert ready.token_ids == [*tokens(), 7]


async def test_an_encode_worker_that_does_not_answer_is_followed_by_the_next_and_then_the_engine_itself(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, one_of_two = Processor(), Encoders({1: ConnectionError("gone"), 2: HANDLES})
    for _ in range(2):
        await make(engine, one_of_two).load(tokens(), [sent()])
    assert [prompt.handles for prompt in engine.given] == [HANDLES] * 2
    assert engine.given[0].text == TEXT, "TensorRT-LLM makes the prompt of it"
    assert {question["text"] for _, question in one_of_two.asked} == {TEXT}
    none = Encoders({1: ConnectionError("gone")})
    await make(engine, none).load(tokens(), [sent()])
    assert len(engine.given[-1].pictures) == 1
    monkeypatch.setenv("TLLM_MULTIMODAL_DISAGGREGATED", "1")  # the LLM has no tower
    with pytest.raises(NoEncoder, match="no encode worker answered"):
        await make(engine, none).load(tokens(), [sent()])


async def test_a_refusal_of_an_encode_worker_is_told_under_the_clients_own_label(make: Make) -> None:
    refused = {"error": "[this picture] is no picture", "status": 415, "picture": 1}
    workers = Encoders({1: refused, 2: refused})
    with pytest.raises(MediaError, match=r"^data:image/png URL of \d+ characters is no picture$") as told:
        await make(Processor(), workers).load(tokens(), [sent("red"), sent("blue")])
    assert told.value.status == 415
    assert len(workers.asked) == 1, "another one would find it too"


async def test_a_picture_of_a_shape_or_size_that_can_not_be_is_refused_before_it_is_prepared(make: Make) -> None:
    for width, height, status, says in (
        (2, 9, 422, "2x9 pixels, which this model can't take: it is too high$"),
        (13, 5, 413, "makes 65 tokens of the prompt, and the context holds 64; send a smaller one$"),
    ):
        file = io.BytesIO()
        Image.new("RGB", (width, height)).save(file, "PNG")
        engine = Processor(counts=8)
        with pytest.raises(MediaError, match=rf"^data:image/png URL of \d+ characters (has )?{says}") as told:
            await make(engine).load(tokens(), [sent(data=file.getvalue())])
        assert (told.value.status, engine.given) == (status, [])
    workers = Encoders({1: HANDLES})
    await make(Processor(), workers).load(tokens(), [sent()])
    assert workers.asked[0][1]["most_rows"] == 64


async def test_handles_that_no_request_takes_are_let_go_of_once(make: Make) -> None:
    engine = Processor(refuses=True)
    with pytest.raises(InvalidRequest, match="refuses it"):
        await make(engine, Encoders({1: HANDLES})).load(tokens(), [sent()])
    await until(lambda: engine.dropped == [HANDLES])
    for is_taken in (False, True):
        engine = Processor()
        looking = PromptRequestMedia(make(engine, Encoders({1: HANDLES})), [sent()])
        ready = await looking.ready(tokens())
        ready.is_taken = is_taken
        looking.close()
        if not is_taken:
            await until(lambda engine=engine, ready=ready: engine.dropped == [ready])  # type: ignore[misc]
    assert engine.dropped == []


async def test_a_prompt_whose_text_has_other_tokens_is_refused_beside_encode_workers(make: Make) -> None:
    other = [token_id for word in ("a", " <|image_pad|>", "b") for token_id in encode_apart(word)]
    assert other != tokens()
    with pytest.raises(InvalidRequest, match="tokens are not those of its text"):
        await make(Processor(), Encoders({1: HANDLES})).load([*other, *byte_tokens()], [sent()])
    await make(Processor()).load([*other, *byte_tokens()], [sent()])


def test_an_embedding_and_too_many_images_are_refused_before_anything_is_fetched() -> None:
    engine: Any = Processor()
    metrics = MediaMetrics()
    loader = PromptMediaLoader(
        engine, Decoding(PicturePool(None, ONE), metrics), tokenizer=None, workers=None,
        limits=replace_limits(max_images=1), metrics=metrics,
    )  # fmt: skip
    embedding = {"Url": "data:application/x-safetensors;base64,AAAA"}
    for items, says in (([embedding], "brings an embedding"), ([{"Url": "data:,"}] * 2, "brings 2 images")):
        with pytest.raises(InvalidRequest, match=says):
            loader.media_of({"token_ids": [7], "multi_modal_data": {"image_url": items}})
    assert loader.media_of({"token_ids": [1]}) is None


def replace_limits(**changes: Any) -> MediaLimits:
    return ONE.model_copy(update=changes)


def encode_apart(word: str) -> list[int]:
    return list(load_tokenizer(resolve_checkpoint(MODEL).path).encode(word).ids)


def byte_tokens() -> list[int]:
    """A character's bytes, cut in the middle: no text has them."""
    return encode_apart("\N{GRINNING FACE}")[:-1]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_question_that_is_cancelled_while_its_file_is_written_leaves_none(make: Make, tmp_path: Path) -> None:
    begun, may_go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def written(value: Any) -> SharedTensor:
        begun.set()
        assert may_go_on.wait(60)
        try:
            return share(value, tmp_path)
        finally:
            ended.set()

    loader = make(Processor(), Encoders({1: HANDLES}), share_bytes=written)
    asking = asyncio.create_task(loader.load(tokens(), [sent()]))
    assert await asyncio.to_thread(begun.wait, 60)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    may_go_on.set()
    assert await asyncio.to_thread(ended.wait, 60)
    async with asyncio.timeout(60):
        while [*tmp_path.iterdir()]:
            await asyncio.sleep(0.001)
