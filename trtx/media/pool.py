"""A bounded pool of processes that decode and preprocess media, so that the event loop does neither.

Each process has one asyncio task, which starts it, sends it files from a shared queue one at a time, and replaces it if
it ends or takes too long. A file that crashes a process only fails itself.
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
from trtx.media.messages import (
    Answer,
    DecodeFailed,
    MediaJob,
    MediaRefused,
    Patches,
    Rgb,
    Setup,
    Tensor,
    VideoRule,
    Work,
)

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

_DELIVERIES = 3  # attempts for a file whose processes ended before they had received it
_LOOK_S = 0.05  # minimum interval between two readings of a process's CPU time

PATIENCE = 6.0
"""Wall-clock limit of a file, in multiples of ``decode_timeout_s``.

``decode_timeout_s`` itself limits the CPU time of the file's process, because a file is not at fault if other processes
use the cores.
"""


def decode_seconds(limits: MediaLimits) -> float:
    """The longest wall-clock time from when a process begins with a file until it is answered or refused."""
    return PATIENCE * limits.decode_timeout_s


@dataclass(frozen=True, slots=True)
class Prepared:
    """The input of a vision encoder.

    The receiver owns the tensor and removes it once the encoder has opened it, or will not open it. ``pixels``:
    float32, in the shape of the checkpoint's image processor: ``[1, 3, height, width]`` for CLIP, ``[patches, values]``
    for Qwen. ``grid``: time, height and width in patches before merging; None if the processor returns none. ``clip``:
    for videos.
    """

    pixels: SharedTensor
    grid: Grid | None
    clip: Clip | None = None


@dataclass(frozen=True, slots=True)
class GivenEmbedding:
    """An embedding that the client sent. The receiver owns the tensor and removes it.

    ``rows``: ``[rows, hidden]`` in the requested dtype. ``grid``: in patches before merging.
    """

    rows: SharedTensor
    grid: Grid | None


@dataclass(slots=True)
class _Waiting:
    """A queued file. The caller may cancel ``answer`` at any time."""

    job: MediaJob
    data: bytes
    answer: asyncio.Future[tuple[Answer, bytes | bytearray]]


class PicturePool:
    """A pool for one event loop; an async context manager.

    ``model_dir``: the model whose image processor is used; None: no ``prepare``. ``videos``: how the model samples
    videos; None: not at all. ``directory``: for shared tensors; None: the process's temporary directory, which a
    topology removes. ``patience``: see :data:`PATIENCE`.
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
        self._processes: dict[int, DecodingProcess] = {}  # by slot; missing while a process is being replaced
        self._open = 0  # files that wait or are being decoded, including those whose callers have gone

    async def __aenter__(self) -> PicturePool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Pids of the processes that run now."""
        return tuple(process.pid for process in self._processes.values())

    @property
    def waiting(self) -> int:
        """Number of files that no process has begun."""
        return self._queue.qsize()

    async def start(self) -> None:
        """Starts all processes and waits until each can take a file.

        Raises UsageError for a checkpoint without a usable processor, LaunchError if a process can't be started; no
        process is left then.
        """
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
        """Kills the processes; files that wait or are being decoded fail with a MediaError."""
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
        """An image, or a video's frames, as preprocessed by the model's processor.

        Raises MediaError; SharedTensorError if the disk is full.
        """
        assert self._has_model, "a pool that prepares has a model"
        work: Work = "frames" if blob.kind == "video" else "pixels"
        answer, _ = await self._ask(MediaJob(work, blob.label, len(blob.data)), blob.data)
        assert isinstance(answer, Tensor)
        return Prepared(answer.tensor, answer.grid, answer.clip)

    async def patches(self, blob: Blob) -> int | None:
        """Number of patches that :meth:`prepare` would make of an image, from its header; None: unknown in advance.

        Raises MediaError.
        """
        assert self._has_model, "a pool that prepares has a model"
        answer, _ = await self._ask(MediaJob("patches", blob.label, len(blob.data)), blob.data)
        assert isinstance(answer, Patches)
        return answer.count

    async def rgb(self, blob: Blob) -> np.ndarray:
        """The image as uint8 ``[height, width, 3]``, rotated as EXIF says, on a white background. Raises MediaError."""
        import numpy as np

        answer, pixels = await self._ask(MediaJob("rgb", blob.label, len(blob.data)), blob.data)
        assert isinstance(answer, Rgb)
        return np.frombuffer(pixels, np.uint8).reshape(answer.height, answer.width, 3)

    async def embedding(self, blob: Blob, *, hidden: int, dtype: str = "float32") -> GivenEmbedding:
        """Reads a ``.safetensors`` file with one embedding of ``hidden`` columns, and converts it to ``dtype``.

        Raises MediaError. The caller checks the number of rows.
        """
        answer, _ = await self._ask(MediaJob("embedding", blob.label, len(blob.data), hidden, dtype), blob.data)
        assert isinstance(answer, Tensor)
        return GivenEmbedding(answer.tensor, answer.grid)

    async def _ask(self, job: MediaJob, data: bytes) -> tuple[Answer, bytes | bytearray]:
        if not self._keepers:
            raise _stopping()
        if self._open >= self._limits.decode_processes + self._limits.decode_queue:
            raise MediaError(
                429, f"{self._limits.decode_queue} images already wait to be decoded, which is the limit; try again"
            )
        waiting = _Waiting(job, data, asyncio.get_running_loop().create_future())
        self._open += 1
        self._queue.put_nowait(waiting)
        try:
            answer, more = await waiting.answer
        except asyncio.CancelledError:
            _discard(waiting)
            raise
        if isinstance(answer, MediaRefused):
            raise MediaError(answer.status, answer.text)
        if isinstance(answer, DecodeFailed):
            raise SharedTensorError(answer.text)
        return answer, more

    async def _keep(self, slot: int) -> None:
        """Serves one slot of the pool: whatever happens to its process, the next file finds one."""
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
                with suppress(LaunchError, UsageError):  # the next file tries again and reports the failure
                    await self._start_process(slot, self._again)

    async def _hand_over(self, slot: int, waiting: _Waiting) -> None:
        """Processes one file. Raises MediaError if the file, or the process that had received it, fails."""
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
                # the connection may be in the middle of a message, so the process can't be used again
                await self._end_process(slot)
                raise
            else:
                return _give(waiting, answer, more)
        raise MediaError(429, f"no process that decodes images stayed long enough to take {label}; try again")

    async def _answer(self, process: DecodingProcess, waiting: _Waiting) -> tuple[Answer, bytes | bytearray]:
        """The answer to one file.

        Raises ProcessEnded; MediaError if the file takes too much CPU time, or too long in total.
        """
        label, limit_s, clock = waiting.job.label, self._limits.decode_timeout_s, asyncio.get_running_loop().time
        begun_s, until = process.cpu_s(), clock() + self._patience_s
        asked = asyncio.create_task(process.ask(waiting.job, waiting.data))
        left_s = limit_s
        try:
            while True:
                # A single-threaded process can't use up its CPU time faster than the clock, so there is no need to look
                # earlier.
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
            # the task must release the socket before the socket is closed
            await asyncio.gather(asked, return_exceptions=True)

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
    """Frees the answer of a cancelled caller, which may have received it without having run since."""
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
    return Stopping(429, "the worker that was to decode the image is stopping; try again")
