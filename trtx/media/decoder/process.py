"""``python -m trtx.media.decoder.process <fd>``: one decoding process of a pool; it works on one file at a time.

It ends with its parent: at the socket's end of file, or in the middle of a file by the kernel's death signal. It
ignores SIGINT and SIGTERM, because a terminal sends them to the whole process group and the parent decides when this
process ends.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from trtx.errors import UsageError
from trtx.garbage import nothing_of_it_is_garbage
from trtx.ipc.shared_tensor import SharedTensorError, share
from trtx.media.decoder import embeddings, pictures
from trtx.media.decoder.processor import ImageProcessor, VideoLimits
from trtx.media.errors import MediaError
from trtx.media.messages import (
    LENGTH,
    Answer,
    DecodeFailed,
    DecoderReady,
    Down,
    MediaJob,
    MediaRefused,
    Patches,
    Rgb,
    Setup,
    Taken,
    Tensor,
    Unusable,
    frame,
)

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_OOM_SCORE = "500"  # if memory runs out, the kernel kills this process before the worker or its engine
# If cores are scarce, the worker and its engine take precedence, so that images hardly delay other requests' text.
# Against one of their threads, niceness 10 leaves a tenth of a core. Niceness 19 leaves a seventieth, with which a
# photograph took more than 20 s.
_NICENESS = 10
# <malloc.h>. Arrays up to 32 MiB, glibc's maximum, come from the heap, and 256 MiB of freed heap are kept. Mapping and
# clearing them again for each image took 20 of the 53 ms of a one-megapixel image.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _HEAP_ARRAY_BYTES = 256 << 20, 32 << 20
_MESSAGE = msgspec.msgpack.Decoder(Down)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    keeps_memory = hasattr(libc, "mallopt")  # missing on musl
    if keeps_memory:
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, _HEAP_ARRAY_BYTES)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE, encoding="ascii")
    parent = socket.socket(fileno=int(sys.argv[1]))
    setup = _message(parent)
    assert isinstance(setup, Setup), f"the first message is {type(setup).__name__}"
    # Importing transformers takes a second of CPU time, which at this niceness can be two minutes on a busy machine,
    # and a pool's first images would wait for it. A replacement is niced before the import, because clients can cause
    # any number of replacements.
    if setup.is_replacement:
        os.nice(_NICENESS)
    try:
        with nothing_of_it_is_garbage():
            processor = None if setup.model_dir is None else ImageProcessor(Path(setup.model_dir), setup.videos)
    except UsageError as error:
        parent.sendall(frame(Unusable(str(error))))
        return
    if not setup.is_replacement:
        os.nice(_NICENESS)
    _limit_memory(setup.memory_bytes)
    parent.sendall(frame(DecoderReady()))
    while True:
        job = _message(parent)
        assert isinstance(job, MediaJob), f"a job is {type(job).__name__}"
        data = _receive(parent, job.size)
        parent.sendall(frame(Taken()))
        try:
            try:
                answer, pixels = _answer(job, data, setup, processor)
            except MemoryError:
                # memory left over from earlier files is not this file's fault
                if not (keeps_memory and libc.malloc_trim(0)):
                    raise
                answer, pixels = _answer(job, data, setup, processor)
        except MemoryError:
            parent.sendall(frame(MediaRefused(413, _too_much_memory(job, setup))))
            return  # another process replaces this one, with a clean heap
        parent.sendall(frame(answer))
        parent.sendall(pixels)
        del data, pixels


def _answer(job: MediaJob, data: bytearray, setup: Setup, processor: ImageProcessor | None) -> tuple[Answer, bytes]:
    """The answer, and the bytes that follow it."""
    directory = Path(setup.directory)
    try:
        if job.work == "embedding":
            rows, grid = embeddings.read(data, job.label, job.hidden)
            return Tensor(share(embeddings.made(rows, job.dtype, job.label), directory, job.dtype), grid), b""
        if job.work == "frames":
            assert processor is not None, "a pool without a model was asked for frames"
            limits = VideoLimits(setup.max_pixels, setup.max_frames, setup.max_video_s)
            pixels, grid, clip = processor.prepare_video(data, job.label, limits)
            return Tensor(share(pixels, directory), grid, clip), b""
        if job.work == "patches":
            assert processor is not None, "a pool without a model was asked for patches"
            return Patches(processor.patches(*pictures.size_of(data, job.label, setup.max_pixels))), b""
        picture = pictures.decode(data, job.label, setup.max_pixels)
        if job.work == "rgb":
            return Rgb(picture.height, picture.width), picture.tobytes()
        assert processor is not None, "a pool without a model was asked for pixels"
        pixels, grid = processor.prepare(picture, job.label, setup.max_pixels)
        return Tensor(share(pixels, directory), grid), b""
    except MediaError as error:
        return MediaRefused(error.status, str(error)), b""
    except SharedTensorError as error:
        return DecodeFailed(str(error)), b""


def _too_much_memory(job: MediaJob, setup: Setup) -> str:
    smaller = "a video with smaller frames" if job.work == "frames" else "a smaller file"
    return (
        f"{job.label} needs more than {setup.memory_bytes} bytes of memory, the most that decoding may take "
        f"(--decode-memory-bytes); send {smaller}, or serve with more"
    )


def _limit_memory(more_bytes: int) -> None:
    """Limits memory to what is mapped now plus ``more_bytes``.

    Disables core dumps, which would contain clients' images.
    """
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _message(parent: socket.socket) -> Down:
    (size,) = LENGTH.unpack(_receive(parent, LENGTH.size))
    message: Down = _MESSAGE.decode(_receive(parent, size))
    return message


def _receive(parent: socket.socket, size: int) -> bytearray:
    """Receives ``size`` bytes. Ends this process if the parent is gone."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = 0
        with suppress(OSError):
            count = parent.recv_into(view)
        if not count:
            os._exit(0)
        view = view[count:]
    return data


if __name__ == "__main__":
    main()
