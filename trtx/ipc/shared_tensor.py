"""Tensors shared between the processes of one topology, each in a file of its scratch directory.

The scratch directory is the common ``$TMPDIR`` of all these processes. A file appears complete or not at all, is never
rewritten, and is mapped when opened: an open tensor outlives its file. The process that shares a tensor removes the
file when no recipient needs to open it any more, or hands over this duty together with the tensor. Files of a killed
worker are removed when the next worker starts, or afterwards, as soon as all processes of the killed one have ended
(:func:`remove_left`). The launcher and its guardian remove all other files with the directory.

Nothing is pickled. A file has a header with dtype and shape, followed by the tensor's bytes in C order. For a tensor in
a process's memory, such as a GPU's, the header is followed by its place there, and the file keeps that data alive.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import torch

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "uint8": 1}
"""Dtypes that can be shared, by torch's name, with their size in bytes."""

_MAGIC = b"trtx tensor 1\n"
_ELSEWHERE = b"trtx tensor elsewhere 1\n"
_HEADER_BYTES = 256  # keeps the data on a cache line, aligned for every dtype
_MAX_DIMENSIONS = 8
_SUFFIX = ".tensor"
_TAKEN = ".taken"  # suffix of a taken-over file whose data is elsewhere; its owner finds the file by this name
_MAX_PLACE_BYTES = 1 << 20
_OWNED = re.compile(r"([1-9]\d*)-[0-9a-f]{32}\.[a-z]+")  # the session id; 0 if its leader is not visible


class SharedTensorError(Exception):
    """The file is not a tensor, is shorter than its tensor, has another dtype or shape, or can't be written."""


class SharedTensorGone(SharedTensorError):
    """The file does not exist: its owner has removed it, or died with its topology."""


class SharedTensorElsewhere(SharedTensorError):
    """The data is in a process's memory. ``place``: how to reach it, as that process wrote it."""

    def __init__(self, shared: SharedTensor, place: bytes) -> None:
        super().__init__(f"the data of the shared tensor {shared.path} lies in the memory of the process that made it")
        self.place = place


class SharedTensor(msgspec.Struct, frozen=True, array_like=True):
    """The file of a tensor, with its expected dtype and shape. ``dtype``: a key of :data:`DTYPE_BYTES`."""

    path: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the data. Raises SharedTensorError for a dtype or shape that can't be shared."""
        return _nbytes(self.dtype, self.shape)


def share(
    value: np.ndarray[Any, Any] | torch.Tensor, directory: Path | None = None, dtype: str | None = None
) -> SharedTensor:
    """Writes a numpy array or a torch tensor (a copy, from any device) to a new file that only this user can read.

    ``directory``: the scratch directory; None: this process's. ``dtype``: element type, if numpy has no name for it.
    Raises SharedTensorError, and leaves no file, for any other dtype and if the directory is gone or full.
    """
    name = dtype or str(value.dtype).removeprefix("torch.")
    return _write(_MAGIC, name, tuple(int(size) for size in value.shape), _bytes_of(value), directory)


def share_place(dtype: str, shape: tuple[int, ...], place: bytes) -> SharedTensor:
    """Writes a file for a tensor whose data is at ``place``; :func:`open_shared` of it raises SharedTensorElsewhere.

    The data must stay as long as the file has a name. Raises like :func:`share`.
    """
    return _write(_ELSEWHERE, dtype, shape, memoryview(place), None)


def _write(magic: bytes, name: str, shape: tuple[int, ...], data: memoryview, directory: Path | None) -> SharedTensor:
    size = _nbytes(name, shape)
    encoded = msgspec.msgpack.encode((name, shape))
    header = (magic + bytes([len(encoded)]) + encoded).ljust(_HEADER_BYTES, b"\0")
    assert len(header) == _HEADER_BYTES, "eight sizes of 64 bits fit"
    folder = Path(tempfile.gettempdir()) if directory is None else directory
    path = folder / _unknown_name()
    unfinished = path.with_suffix(".partial")
    try:
        try:
            end = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(end, "wb", buffering=0) as file:
                for part in (memoryview(header), data):
                    while part:  # a write stops early at a signal, and above 2 GiB
                        part = part[file.write(part) :]
            unfinished.rename(path)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()
            raise
    except OSError as error:
        raise SharedTensorError(
            f"can't write a tensor of {size} bytes into {folder} ({error.strerror}); expected room there; "
            "set TMPDIR to a directory with more of it"
        ) from error
    return SharedTensor(str(path), name, shape)


def open_shared(shared: SharedTensor) -> torch.Tensor:
    """Returns the tensor on the CPU, mapped: bytes are read on first use, and writes do not reach the file.

    Raises SharedTensorGone if the file does not exist, SharedTensorElsewhere if the data is in a process's memory,
    SharedTensorError if the file does not match ``shared``.
    """
    import torch

    mapped = _map(shared)
    dtype = getattr(torch, shared.dtype)
    if mapped is None:
        return torch.empty(shared.shape, dtype=dtype)
    flat = torch.frombuffer(mapped, dtype=dtype, offset=_HEADER_BYTES)  # keeps the mapping alive
    return flat.view(shared.shape)


def read_shared(shared: SharedTensor) -> bytes:
    """Returns a copy of the elements in C order, without torch. Raises like :func:`open_shared`."""
    mapped = _map(shared)
    return b"" if mapped is None else mapped[_HEADER_BYTES:]


def take_over(shared: SharedTensor) -> SharedTensor:
    """Renames the file to a name that no other recipient knows.

    The first process to call it gets the tensor; for all others it is gone. Needs no torch. If the data is elsewhere,
    its owner can still end it with :func:`remove_shared`. Raises like :func:`open_shared`, and for a file outside this
    process's scratch directory, since the name came in a message.
    """
    path = Path(shared.path)
    if path.parent != Path(tempfile.gettempdir()) or path.suffix != _SUFFIX:
        raise SharedTensorError(f"{path} is not a shared tensor of {tempfile.gettempdir()}, the scratch directory")
    own = path.with_name(_unknown_name())
    try:
        _map(shared)
    except SharedTensorElsewhere:
        own = path.with_suffix(_TAKEN)
    try:
        path.rename(own)
    except OSError as error:
        raise SharedTensorGone(f"the shared tensor {path} is gone; another reader took it, or it expired") from error
    return SharedTensor(str(own), shared.dtype, shared.shape)


def lend(shared: SharedTensor) -> SharedTensor:
    """Creates another link to the file for one reader, who must remove it.

    Raises SharedTensorError if the file is gone.
    """
    path = Path(shared.path)
    name = path.with_name(_unknown_name())
    try:
        os.link(path, name)
    except OSError as error:
        raise SharedTensorError(f"the tensor {path} can't be lent ({error.strerror})") from error
    return msgspec.structs.replace(shared, path=str(name))


def remove_left(directory: Path | None = None) -> tuple[int, ...]:
    """Removes the files of sessions without living processes.

    ``directory``: the scratch directory, whose processes must all see one another; None: this process's. Returns the
    living processes of sessions whose leader is dead: they belong to killed workers and end soon, and this must be
    called again afterwards.
    """
    # List files before processes, so that files of a session that starts in between are not seen.
    there = list((Path(tempfile.gettempdir()) if directory is None else directory).iterdir())
    living = _living()
    lingering: set[int] = set()
    for path in there:
        owned = _OWNED.fullmatch(path.name)
        if owned is None:
            continue
        members = living.get(int(owned[1]), ())
        if not members:
            with suppress(OSError):
                path.unlink()
        elif int(owned[1]) not in members:
            lingering.update(members)
    return tuple(lingering)


def _living() -> dict[int, list[int]]:
    """Living processes by session.

    A zombie counts as ended, even if its parent has not reaped it yet: the first process of a container may take
    seconds to reap orphans.
    """
    found: dict[int, list[int]] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                fields = (process / "stat").read_bytes().rpartition(b")")[2].split()  # proc(5), from the state on
                has_ended = fields[0] in (b"Z", b"X") and int(fields[17]) <= 1  # its first thread may end before others
                if not has_ended:
                    found.setdefault(int(fields[3]), []).append(int(process.name))
    return found


def _unknown_name() -> str:
    """Returns an unguessable file name that starts with this process's session id.

    A worker and all processes that it starts form one session.
    """
    return f"{os.getsid(0)}-{secrets.token_hex(16)}{_SUFFIX}"


def _map(shared: SharedTensor) -> mmap.mmap | None:
    """Maps and validates the file; None for a tensor without elements."""
    size = shared.nbytes
    try:
        # A name from a message may be a pipe, which would block, or a link to another place.
        end = os.open(shared.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise SharedTensorGone(
            f"the shared tensor {shared.path} is gone; expected it to be kept until it was opened; send it again"
        ) from error
    except (OSError, ValueError) as error:
        raise SharedTensorError(f"can't open the shared tensor {shared.path}: {error}") from error
    try:
        status = os.fstat(end)
        if not stat.S_ISREG(status.st_mode):
            raise SharedTensorError(f"{shared.path} is not a regular file; expected a shared tensor")
        magic = _check_header(os.pread(end, _HEADER_BYTES, 0), shared)
        if magic == _ELSEWHERE:
            raise SharedTensorElsewhere(shared, os.pread(end, _MAX_PLACE_BYTES, _HEADER_BYTES))
        if status.st_size != _HEADER_BYTES + size:
            raise SharedTensorError(
                f"the shared tensor {shared.path} has {status.st_size - _HEADER_BYTES} bytes of data; expected {size}, "
                f"{shared.dtype} of shape {list(shared.shape)}"
            )
        if size == 0:
            return None
        # Copy-on-write: torch warns about read-only memory.
        return mmap.mmap(end, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(end)


def remove_shared(shared: SharedTensor) -> None:
    """Removes the file, on behalf of its owner; open tensors stay valid. Does nothing if the file is gone."""
    path = Path(shared.path)
    for name in (path, path.with_suffix(_TAKEN)):
        with suppress(OSError):
            name.unlink()


def is_kept(shared: SharedTensor) -> bool:
    """Whether the file was neither taken over nor removed. If its data is elsewhere: whether it was not removed."""
    path = Path(shared.path)
    return path.exists() or path.with_suffix(_TAKEN).exists()


def _check_header(header: bytes, shared: SharedTensor) -> bytes:
    """Validates the header and returns the file's magic."""
    found = None
    magic = _ELSEWHERE if header.startswith(_ELSEWHERE) else _MAGIC
    if len(header) == _HEADER_BYTES and header.startswith(magic):
        first = len(magic) + 1
        with suppress(msgspec.DecodeError):
            found = _HEADER.decode(header[first : first + header[len(magic)]])
    if found is None:
        raise SharedTensorError(f"{shared.path} has no header of a shared tensor; expected one that trtx wrote")
    if found != (shared.dtype, shared.shape):
        raise SharedTensorError(
            f"the shared tensor {shared.path} is {found[0]} of shape {list(found[1])}; expected {shared.dtype} of "
            f"shape {list(shared.shape)}"
        )
    return magic


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    if dtype not in DTYPE_BYTES:
        raise SharedTensorError(f"a tensor of {dtype} can't be shared; expected one of {', '.join(DTYPE_BYTES)}")
    if len(shape) > _MAX_DIMENSIONS or any(not 0 <= size < 2**63 for size in shape):
        raise SharedTensorError(
            f"a tensor of shape {list(shape)} can't be shared; expected at most {_MAX_DIMENSIONS} sizes, none negative"
        )
    return math.prod(shape) * DTYPE_BYTES[dtype]


def _bytes_of(value: np.ndarray[Any, Any] | torch.Tensor) -> memoryview:
    """Bytes of the elements in C order. A tensor on a device, or one that is not contiguous, is copied first."""
    import numpy as np

    if not isinstance(value, np.ndarray):
        import torch

        value = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data


# The first use of these types happens here, in the importing thread: see llm_args.
_HEADER = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...]])
msgspec.msgpack.Decoder(SharedTensor)
