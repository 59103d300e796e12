"""What a request's end does to its worker: one that nobody reads any more is no engine's death, an engine's error is.

Dynamo begins a stream in a thread without a loop, and drops it in one where its reader has gone: the generator is then
closed by whoever drops it last.
"""

from __future__ import annotations

import asyncio
import base64
import io
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dynamo._core import Context
from dynamo.llm.exceptions import EngineShutdown, Unknown
from PIL import Image

from trtx.config.media import MediaLimits
from trtx.engine.api import Engine, EngineApi, EngineFacts, PicturePrompt, ReadyPrompt, remove_shared, share
from trtx.media import PicturePool
from trtx.torch_engine.llmapi import CompletionOutput, DisaggregatedParams, RequestOutput, SamplingParams
from trtx.worker.background import Background
from trtx.worker.handler import RequestHandler
from trtx.worker.leaving import Leaving
from trtx.worker.loading import LoadedEngine
from trtx.worker.metrics import WorkerMetrics
from trtx.worker.multimodal.decoding import Decoding
from trtx.worker.multimodal.encode_endpoint import ASKED
from trtx.worker.multimodal.handle_encoder import HandleEncoder, question, read_answer
from trtx.worker.multimodal.media_metrics import MediaMetrics
from trtx.worker.multimodal.prompt_media_loader import PromptMediaLoader
from trtx.worker.parts import WorkerParts
from trtx.worker.requests import pacing
from trtx.worker.requests.open_requests import OpenRequests
from trtx.worker.sleeping import Sleeping
from trtx.worker.status import StatusFile

pytestmark = pytest.mark.slow

ONE = MediaLimits(decode_processes=1)
HANDLES = {"multimodal_embedding_handles": [{}]}
WAIT_SECONDS = 20


class Answer:
    """An engine's result that gives nothing until it is told to, or fails; it cleans up on its loop."""

    finished = False

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self.is_aborted = False

    outputs = ()

    def abort(self) -> None:
        self.is_aborted = True

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Any:
        if self._error is not None:
            raise self._error
        try:
            await asyncio.Event().wait()
        finally:
            asyncio.get_running_loop()


class Executor(Engine):
    """After each of its errors its state is unknown, as TensorRT-LLM's."""

    facts = EngineFacts(context_length=64, image_token_id=7)

    def __init__(self, error: Exception | None = None) -> None:
        self.answer = Answer(error)
        self.is_asked, self.may_end = threading.Event(), threading.Event()
        self.dropped: list[Mapping[str, Any]] = []
        self._error = error

    def generate_async(self, inputs: list[int], sampling_params: Any, **asked: Any) -> Any:
        return self.answer

    def encode(self, prompt: PicturePrompt) -> Mapping[str, Any]:
        self.is_asked.set()
        assert self.may_end.wait(WAIT_SECONDS)
        if self._error is not None:
            raise self._error
        return HANDLES

    def prepare_prompt(self, prompt: PicturePrompt) -> ReadyPrompt:
        self.is_asked.set()
        assert self.may_end.wait(WAIT_SECONDS)
        return ReadyPrompt(prompt.token_ids, None, HANDLES)

    def drop_handles(self, handles: Mapping[str, Any]) -> None:
        self.dropped.append(handles)

    def drop_prompt(self, prompt: ReadyPrompt) -> None:
        self.dropped.append(prompt.params)

    def is_alive(self) -> bool:
        return True

    def shutdown(self) -> None: ...


class Worker:
    def __init__(
        self,
        engine: Executor,
        role: str,
        encoder: HandleEncoder | None = None,
        media_loader: PromptMediaLoader | None = None,
    ) -> None:
        self.engine, self.metrics = engine, WorkerMetrics()
        options: Any = SimpleNamespace(name=f"{role}-0", role=role)
        api = EngineApi(
            kind="tensorrt-llm", engine_type="trtllm", start=lambda model, config: engine,
            SamplingParams=SamplingParams, DisaggregatedParams=DisaggregatedParams, Logprob=None,
            fault=lambda error: "fatal", new_request_ids=lambda worker_id: lambda: None,
        )  # fmt: skip
        self.leaving = Leaving(options.name, StatusFile(None))
        self.open = OpenRequests(Background())
        poll: Any = SimpleNamespace(saw_token=lambda: None)
        loaded = LoadedEngine(api, engine, None, kv_event_buffer=0, load_seconds=0.0, shutdown_seconds=1.0)
        parts = WorkerParts(
            options, loaded, new_id=lambda: None, poll=poll, metrics=self.metrics, open_requests=self.open,
            leaving=self.leaving, sleeping=Sleeping(options.name, engine, StatusFile(None), lambda: ""),
            media_loader=media_loader, encoder=encoder,
        )  # fmt: skip
        self.handler = RequestHandler(parts)


@pytest.fixture
def ended() -> Iterator[list[int]]:
    """Signals that a worker ended itself with."""
    signals: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    yield signals
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
async def decoding() -> AsyncIterator[Decoding]:
    async with PicturePool(None, ONE) as pool:
        decoding = Decoding(pool, MediaMetrics())
        decoding._starting = asyncio.ensure_future(asyncio.sleep(0))
        yield decoding


@pytest.fixture
def encoder(decoding: Decoding) -> Callable[[Executor], HandleEncoder]:
    return lambda engine: HandleEncoder(engine, decoding)


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (6, 4)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def picture(tmp_path: Path) -> Iterator[dict[str, Any]]:
    shared = share(np.frombuffer(png(), np.uint8), tmp_path)
    yield {"token_ids": [0], "extra_args": {ASKED: question("a", [shared], 64)}}
    remove_shared(shared)


TEXT = {"token_ids": [1, 2], "stop_conditions": {"max_tokens": 4}, "sampling_options": {}, "output_options": {}}


async def begun(answers: AsyncGenerator[Any, None]) -> Any:
    """Its first step, in the loop, of a generator that was made for no loop's hooks."""
    step = await asyncio.to_thread(answers.__anext__)
    step.send(None)
    return step


async def drop(held: list[Any]) -> None:
    """In a thread that runs no loop."""
    await asyncio.to_thread(held.clear)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_stream_that_is_dropped_while_a_picture_is_encoded_ends_no_worker(
    ended: list[int], encoder: Callable[[Executor], HandleEncoder], picture: dict[str, Any]
) -> None:
    engine = Executor()
    worker = Worker(engine, "encode", encoder(engine))
    answers: Any = worker.handler.generate(picture, Context())  # type: ignore[arg-type]
    held = [await begun(answers), answers]
    del answers
    await until(engine.is_asked.is_set)
    await drop(held)
    engine.may_end.set()
    await until(lambda: engine.dropped == [HANDLES])
    assert (ended, worker.leaving.engine_died) == ([], False)
    assert (dict(worker.metrics.outcomes)["cancelled"], worker.metrics.open_requests) == (1, 0)


async def test_a_stream_that_is_dropped_while_its_prompt_is_prepared_ends_no_worker_and_leaves_nothing(
    ended: list[int], decoding: Decoding
) -> None:
    engine = Executor()
    media_loader = PromptMediaLoader(engine, decoding, tokenizer=None, workers=None, limits=ONE, metrics=MediaMetrics())
    worker = Worker(engine, "agg", media_loader=media_loader)
    url = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    asked: Any = TEXT | {"token_ids": [7], "multi_modal_data": {"image_url": [{"Url": url}]}}
    answers: Any = worker.handler.generate(asked, Context())
    held = [await begun(answers), answers]
    del answers
    await until(engine.is_asked.is_set)
    await drop(held)
    engine.may_end.set()
    await until(lambda: engine.dropped == [HANDLES])
    assert (ended, worker.leaving.engine_died) == ([], False)
    assert (dict(worker.metrics.outcomes)["cancelled"], worker.metrics.open_requests) == (1, 0)


async def test_a_stream_that_is_dropped_while_tokens_are_awaited_ends_no_worker(ended: list[int]) -> None:
    engine = Executor()
    worker = Worker(engine, "agg")
    answers: Any = worker.handler.generate(TEXT, Context())  # type: ignore[arg-type]
    held = [await begun(answers), answers]
    del answers
    assert len(worker.open) == 1
    await drop(held)
    await until(lambda: len(worker.open) == 0 and engine.answer.is_aborted)
    assert (ended, worker.leaving.engine_died) == ([], False)
    assert (dict(worker.metrics.outcomes)["cancelled"], worker.metrics.open_requests) == (1, 0)


REQUEST = RequestOutput(
    1, prompt=None, prompt_token_ids=[1], num_choices=1, streaming=True, on_abort=lambda: None, text_streams=None
)


class Pausing(Executor):
    """Gives a token a step, and keeps how long it was to pause; a pause lasts until it may end."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []
        self.is_over = asyncio.Event()

    def generate_async(self, inputs: list[int], sampling_params: Any, **asked: Any) -> Any:
        return Tokens()

    def pause(self, result: Any, seconds: float) -> Awaitable[None]:
        self.pauses.append(seconds)
        return self.over()

    async def over(self) -> None:
        await self.is_over.wait()


class Tokens(Answer):
    def __init__(self) -> None:
        super().__init__(None)
        self.choice = CompletionOutput(0)
        self.outputs: Any = (self.choice,)

    async def __anext__(self) -> Any:
        self.choice.token_ids.append(65)
        return self


async def test_among_many_streams_one_whose_chunk_was_slow_to_go_pauses_before_the_next() -> None:
    engine = Pausing()
    worker = Worker(engine, "agg")
    worker.metrics.open_requests = 100
    answers: Any = worker.handler.generate(TEXT, Context())  # type: ignore[arg-type]
    await anext(answers)
    await asyncio.sleep(0.01)
    asking = asyncio.ensure_future(anext(answers))
    await until(lambda: len(engine.pauses) == 1)
    assert not asking.done()
    engine.is_over.set()
    assert (await asking)["token_ids"] == [65]
    assert 0.0 < engine.pauses[0] <= pacing.LONGEST_SECONDS
    await answers.aclose()


async def test_an_engine_whose_steps_do_not_add_up_is_asked_for_the_next_at_once() -> None:
    class Stepping(Executor):
        def generate_async(self, inputs: list[int], sampling_params: Any, **asked: Any) -> Any:
            return Tokens()

    worker = Worker(Stepping(), "agg")
    worker.metrics.open_requests = 100
    answers: Any = worker.handler.generate(TEXT, Context())  # type: ignore[arg-type]
    for _ in range(3):
        await anext(answers)
        await asyncio.sleep(0.01)
        with pytest.raises(StopIteration):  # a chunk, without one round of the loop
            answers.__anext__().send(None)
    await answers.aclose()


async def test_few_streams_never_pause() -> None:
    engine = Pausing()
    worker = Worker(engine, "agg")
    answers: Any = worker.handler.generate(TEXT, Context())  # type: ignore[arg-type]
    for _ in range(3):
        await anext(answers)
        await asyncio.sleep(0.01)
    assert engine.pauses == []
    await answers.aclose()


async def test_a_stream_that_is_dropped_while_it_pauses_ends_no_worker(ended: list[int]) -> None:
    class Resting(Pausing):
        async def over(self) -> None:
            await REQUEST.pause(3600)

    engine = Resting()
    worker = Worker(engine, "agg")
    worker.metrics.open_requests = 100
    answers: Any = worker.handler.generate(TEXT, Context())  # type: ignore[arg-type]
    first = await asyncio.to_thread(answers.__anext__)
    with pytest.raises(StopIteration):  # the first chunk
        first.send(None)
    del first
    await asyncio.sleep(0.01)
    held = [await begun(answers), answers]
    del answers
    assert len(engine.pauses) == 1
    await drop(held)
    await until(lambda: len(worker.open) == 0)
    assert (ended, worker.leaving.engine_died, worker.metrics.open_requests) == ([], False, 100)


async def test_an_error_of_the_engine_ends_its_worker_in_the_middle_of_tokens_and_of_a_picture(
    ended: list[int], encoder: Callable[[Executor], HandleEncoder], picture: dict[str, Any]
) -> None:
    for role in ("agg", "encode"):
        engine = Executor(RuntimeError("an illegal memory access"))
        engine.may_end.set()
        worker = Worker(engine, role, encoder(engine) if role == "encode" else None)
        with pytest.raises(EngineShutdown, match="the engine died: an illegal memory access"):
            async for _ in worker.handler.generate(picture if role == "encode" else TEXT, Context()):  # type: ignore[arg-type]
                pass
        assert worker.leaving.engine_died
    assert ended == [signal.SIGTERM] * 2


async def test_an_error_of_the_workers_own_ends_a_request_alone(
    ended: list[int], encoder: Callable[[Executor], HandleEncoder], picture: dict[str, Any]
) -> None:
    class Counting(Executor):
        def rows_of(self, picture: Any) -> int | None:
            raise RuntimeError("of nobody's engine")

    engine = Counting()
    worker = Worker(engine, "encode", encoder(engine))
    with pytest.raises(Unknown, match="RuntimeError: of nobody's engine"):
        async for _ in worker.handler.generate(picture, Context()):  # type: ignore[arg-type]
            pass
    assert (ended, worker.leaving.engine_died) == ([], False)


async def test_a_worker_that_encodes_says_so_until_it_has_the_answer(
    encoder: Callable[[Executor], HandleEncoder], picture: dict[str, Any]
) -> None:
    engine = Executor()
    worker = Worker(engine, "encode", encoder(engine))
    said = []
    async for chunk in worker.handler.generate(picture, Context()):  # type: ignore[arg-type]
        said.append(chunk)
        if engine.is_asked.is_set() and len(said) >= 2:
            engine.may_end.set()
    assert all(chunk == {"token_ids": [], "index": 0} for chunk in said[:-1]) and len(said) > 2
    assert read_answer(said[-1]["encoder_result"]) == HANDLES
