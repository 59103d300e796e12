"""Pictures are decoded and prepared in processes beside the event loop, a bounded number of them.

One asyncio task for each process: it starts it, hands it one file after another from the queue they share, and
replaces it when it has ended or taken too long. What a file does to a process costs that file alone.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trtx.config.media import MediaLimits
from trtx.errors import LaunchError, UsageError
from trtx.ipc.encoder_messages import Clip, Grid
from trtx.ipc.shared_tensor import SharedTensor, SharedTensorError, remove_shared
from trtx.media.blob import Blob
from trtx.media.decoding import DecodingProcess, ProcessEnded
from trtx.media.errors import MediaError, Stopping
from trtx.media.messages import Answer, Failed, Job, Patches, Refused, Rgb, Setup, Tensor, VideoRule, Work

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

_DELIVERIES = 3  # of a file to processes that ended before they had it
_LOOK_S = 0.05  # between two looks at what a process has computed, at least

PATIENCE = 6.0
"""How many times ``decode_timeout_s`` a file may take by the clock. That limit itself is of what its process computed:
how many others want the cores is no fault of a picture."""


def decode_seconds(limits: MediaLimits) -> float:
    """By the clock, from when a process begins with a file until it is answered or refused, at the latest."""
    return PATIENCE * limits.decode_timeout_s


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a vision encoder takes. Whoever got it removes the tensor, once the encoder has opened it or will not.

    ``pixels``: float32, of one picture, as the checkpoint's image processor shapes them: ``[1, 3, height, width]`` of
    CLIP's, ``[patches, values]`` of Qwen's. ``grid``: time, height and width in patches, before any are merged; None
    for a processor that gives none. ``clip``: of a video.
    """

    pixels: SharedTensor
    grid: Grid | None
    clip: Clip | None = None


@dataclass(frozen=True, slots=True)
class GivenEmbedding:
    """``rows``: ``[rows, hidden]`` as the client sent them, in the dtype that was asked for; whoever got it removes the
    tensor. ``grid``: in patches, before any are merged."""

    rows: SharedTensor
    grid: Grid | None


@dataclass(slots=True)
class _Waiting:
    """A file on its way. ``answer`` may be cancelled by its caller at any time."""

    job: Job
    data: bytes
    answer: asyncio.Future[tuple[Answer, bytes | bytearray]]


class PicturePool:
    """``model_dir``: whose image processor prepares; None: no ``prepare``. One event loop, an async context manager.

    ``videos``: how the model takes them; None: not at all. ``directory``: where shared tensors go; None: the process's
    own for temporary files, which a topology removes. ``patience``: see :data:`PATIENCE`.
    """

    def __init__(
        self,
        model_dir: Path | None,
        limits: MediaLimits,
        *,
        videos: VideoRule | None = None,
        directory: Path | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self._limits = limits
        self._patience_s = patience * limits.decode_timeout_s
        self._has_model = model_dir is not None
        self._setup = Setup(
            model_dir=None if model_dir is None else str(model_dir.resolve()),
            videos=videos,
            directory=str(directory or tempfile.gettempdir()),
            max_pixels=limits.max_image_pixels,
            max_frames=limits.max_video_frames,
            max_video_s=limits.max_video_s,
            memory_bytes=limits.decode_memory_bytes,
        )
        self._again = msgspec.structs.replace(self._setup, is_replacement=True)
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._keepers: list[asyncio.Task[None]] = []
        self._processes: dict[int, DecodingProcess] = {}  # by place; absent while one is replaced
        self._open = 0  # files that wait or are being decoded, also for callers that have gone

    async def __aenter__(self) -> PicturePool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes that run now."""
        return tuple(process.pid for process in self._processes.values())

    @property
    def waiting(self) -> int:
        """Files that no process has begun."""
        return self._queue.qsize()

    async def start(self) -> None:
        """Returns when every process can take a file. Raises UsageError for a checkpoint without a usable processor,
        LaunchError where no process can be started; none is left then."""
        slots = range(self._limits.decode_processes)
        try:
            async with asyncio.TaskGroup() as starting:
                for slot in slots:
                    starting.create_task(self._start_process(slot, self._setup))
        except BaseExceptionGroup as errors:
            await self.close()
            raise errors.exceptions[0] from None
        except BaseException:
            await self.close()
            raise
        self._keepers = [asyncio.create_task(self._keep(slot), name=f"media-decoder-{slot}") for slot in slots]

    async def close(self) -> None:
        """Ends the processes; files that wait or are being decoded get a MediaError."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers = []
        for process in self._processes.values():
            await process.kill()
        self._processes = {}
        while not self._queue.empty():
            _fail(self._queue.get_nowait(), _stopping())

    async def prepare(self, blob: Blob) -> Prepared:
        """A picture, or frames of a video, as the model's processor makes them. Raises MediaError; SharedTensorError
        for a full disk."""
        assert self._has_model, "a pool that prepares has a model"
        work: Work = "frames" if blob.kind == "video" else "pixels"
        answer, _ = await self._ask(Job(work, blob.label, len(blob.data)), blob.data)
        assert isinstance(answer, Tensor)
        return Prepared(answer.tensor, answer.grid, answer.clip)

    async def patches(self, blob: Blob) -> int | None:
        """Into how many :meth:`prepare` would cut a picture, by its header alone; None: not known before. Raises
        MediaError."""
        assert self._has_model, "a pool that prepares has a model"
        answer, _ = await self._ask(Job("patches", blob.label, len(blob.data)), blob.data)
        assert isinstance(answer, Patches)
        return answer.count

    async def rgb(self, blob: Blob) -> np.ndarray:
        """``[height, width, 3]`` uint8, turned as EXIF says, on white. Raises MediaError."""
        import numpy as np

        answer, pixels = await self._ask(Job("rgb", blob.label, len(blob.data)), blob.data)
        assert isinstance(answer, Rgb)
        return np.frombuffer(pixels, np.uint8).reshape(answer.height, answer.width, 3)

    async def embedding(self, blob: Blob, *, hidden: int, dtype: str = "float32") -> GivenEmbedding:
        """A ``.safetensors`` file with one embedding of ``hidden`` columns, in ``dtype``. Raises MediaError.

        How many rows a model expects is the caller's to check.
        """
        answer, _ = await self._ask(Job("embedding", blob.label, len(blob.data), hidden, dtype), blob.data)
        assert isinstance(answer, Tensor)
        return GivenEmbedding(answer.tensor, answer.grid)

    async def _ask(self, job: Job, data: bytes) -> tuple[Answer, bytes | bytearray]:
        if not self._keepers:
            raise _stopping()
        if self._open >= self._limits.decode_processes + self._limits.decode_queue:
            raise MediaError(
                429, f"{self._limits.decode_queue} pictures wait to be decoded already, the most that may; try again"
            )
        waiting = _Waiting(job, data, asyncio.get_running_loop().create_future())
        self._open += 1
        self._queue.put_nowait(waiting)
        try:
            answer, more = await waiting.answer
        except asyncio.CancelledError:
            _discard(waiting)
            raise
        if isinstance(answer, Refused):
            raise MediaError(answer.status, answer.text)
        if isinstance(answer, Failed):
            raise SharedTensorError(answer.text)
        return answer, more

    async def _keep(self, slot: int) -> None:
        """The life of one of the pool's places: whatever becomes of its process, the next file finds one."""
        while True:
            waiting = await self._queue.get()
            try:
                if not waiting.answer.done():
                    await self._hand_over(slot, waiting)
            except asyncio.CancelledError:
                _fail(waiting, _stopping())
                raise
            except MediaError as error:
                _fail(waiting, error)
            except LaunchError as error:
                logger.error("%s", error)
                _fail(waiting, _no_process(waiting.job.label))
            except Exception as error:
                logger.exception("decoding %s failed", waiting.job.label)
                _fail(waiting, error)
            finally:
                self._open -= 1
            if slot not in self._processes:
                with suppress(LaunchError, UsageError):  # the next file tries again, and says so
                    await self._start_process(slot, self._again)

    async def _hand_over(self, slot: int, waiting: _Waiting) -> None:
        """Raises MediaError where the file, or the process that had it, came to nothing."""
        label = waiting.job.label
        for _ in range(_DELIVERIES):
            process = self._processes.get(slot) or await self._start_process(slot, self._again)
            try:
                answer, more = await self._answer(process, waiting)
            except ProcessEnded as ended:
                await self._end_process(slot)
                if ended.had_taken:
                    raise MediaError(422, f"{label} ended the process that decoded it; send another file") from ended
            except BaseException:
                await self._end_process(slot)  # in the middle of a message nothing more can be said to it
                raise
            else:
                return _give(waiting, answer, more)
        raise MediaError(429, f"no process that decodes pictures stayed long enough to take {label}; try again")

    async def _answer(self, process: DecodingProcess, waiting: _Waiting) -> tuple[Answer, bytes | bytearray]:
        """Raises ProcessEnded; MediaError for a file that takes too much computing, or too long on busy cores."""
        label, limit_s, clock = waiting.job.label, self._limits.decode_timeout_s, asyncio.get_running_loop().time
        begun_s, until = process.cpu_s(), clock() + self._patience_s
        asked = asyncio.create_task(process.ask(waiting.job, waiting.data))
        left_s = limit_s
        try:
            while True:
                # A process of one thread computes no second in less than one: before that there is nothing to see.
                done, _ = await asyncio.wait({asked}, timeout=max(left_s, _LOOK_S))
                if done:
                    return asked.result()
                used_s, now = process.cpu_s() - begun_s, clock()
                if used_s >= limit_s:
                    raise MediaError(408, f"{label} was not decoded in {limit_s:g} s of computing; send a smaller one")
                if now >= until:
                    raise MediaError(
                        429,
                        f"{label} was not decoded after {self._patience_s:g} s, in which its process got "
                        f"{used_s:.1f} s of a core: the machine is too busy; try again",
                    )
                left_s = min(limit_s - used_s, until - now)
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)  # it lets go of the socket before that is closed

    async def _start_process(self, slot: int, setup: Setup) -> DecodingProcess:
        process = await DecodingProcess.start(setup)
        self._processes[slot] = process
        return process

    async def _end_process(self, slot: int) -> None:
        process = self._processes.pop(slot)
        logger.warning("process %d that decodes pictures is replaced", process.pid)
        await process.kill()


def _give(waiting: _Waiting, answer: Answer, more: bytes | bytearray) -> None:
    if not waiting.answer.done():
        waiting.answer.set_result((answer, more))
    else:
        _remove_tensor(answer)


def _discard(waiting: _Waiting) -> None:
    """Of a caller that leaves: it may have been given an answer and not have run since."""
    answer = waiting.answer
    if answer.done() and not answer.cancelled() and answer.exception() is None:
        _remove_tensor(answer.result()[0])


def _remove_tensor(answer: Answer) -> None:
    if isinstance(answer, Tensor):
        remove_shared(answer.tensor)


def _fail(waiting: _Waiting, error: Exception) -> None:
    if not waiting.answer.done():
        waiting.answer.set_exception(error)


def _no_process(label: str) -> MediaError:
    return MediaError(
        429,
        f"{label} was not decoded: no process for it came up, as the machine is too busy or has no room; try again",
    )


def _stopping() -> MediaError:
    return Stopping(429, "the worker that was to decode the picture is stopping; try again")
