"""Creates a build's directory atomically: it is either complete or absent.

A build is made in ``.<name>.partial`` next to its final directory and renamed when every byte is on disk. A file lock,
which the kernel releases when its holders end, protects it. The next build removes the leftovers of a killed one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from trtx.errors import UsageError

_PARTIAL = ".partial"
_LOCK = "build.lock"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Partial:
    """A build directory in progress, owned by this process.

    A child may inherit ``lock_fd``; the lock lasts until both have ended.
    """

    def __init__(self, target: Path, path: Path, lock_fd: int) -> None:
        self.target, self.path, self.lock_fd = target, path, lock_fd

    def publish(self) -> None:
        """Syncs all files to disk, then moves the directory to its final place."""
        for directory, _, names in os.walk(self.path):
            for name in names:
                _sync(Path(directory) / name)
            _sync(Path(directory))
        self.path.rename(self.target)  # the lock file moves along; waiting processes find the build when it is released
        (self.target / _LOCK).unlink()
        _sync(self.target.parent)


@contextlib.contextmanager
def partial_directory(target: Path, *, on_wait: Callable[[], None]) -> Iterator[Partial | None]:
    """Yields an empty directory to make ``target`` in, or None if ``target`` exists.

    If another process is making ``target``, waits for that process. An unpublished directory is removed when the
    context ends. Raises UsageError if the parent can't be written.
    """
    parent = target.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        claimed = _claim(target, on_wait)
    except OSError as error:
        raise UsageError(
            f"output directory {str(parent)!r} can't be written ({error.strerror}); name another with -o"
        ) from error
    if claimed is None:
        yield None
        return
    try:
        yield claimed
    finally:
        if claimed.path.is_dir():
            _remove(claimed.path)
        os.close(claimed.lock_fd)


def check_space(parent: Path, needed: int) -> None:
    """Raises UsageError if the file system of ``parent`` has fewer than ``needed`` bytes free."""
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise no_space(parent, needed)


def no_space(parent: Path, needed: int) -> UsageError:
    """Returns the error for a full disk, with the total size of the build and the free space."""
    free = shutil.disk_usage(parent).free
    return UsageError(
        f"the disk of {str(parent)!r} is full: the build needs about {needed:,} bytes and {free:,} are free; nothing "
        "was left there: make room, or name another directory with -o"
    )


def is_disk_full(error: BaseException) -> bool:
    """Returns whether an error means a full disk. safetensors has the system's error only as text (seen in 0.8)."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return any(f"os error {number}" in str(error) for number in _FULL)


def _claim(target: Path, on_wait: Callable[[], None]) -> Partial | None:
    path = target.with_name(f".{target.name}{_PARTIAL}")
    while not target.is_dir():
        path.mkdir(exist_ok=True)
        fd = _lock(path, wait=on_wait)
        if fd is None:
            continue
        if not target.is_dir():  # otherwise another process has published it in the meantime
            _clear(path)
            return Partial(target, path, fd)
        _remove(path)
        os.close(fd)
    return None


def _lock(path: Path, *, wait: Callable[[], None] | None) -> int | None:
    """Locks a partial directory; returns the lock's descriptor.

    Returns None if another process renamed or removed the directory, or holds the lock and ``wait`` is None.
    """
    try:
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except FileNotFoundError:
        return None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if wait is None:
                os.close(fd)
                return None
            wait()
            fcntl.flock(fd, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), (path / _LOCK).stat()):
                return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _sweep(parent: Path) -> None:
    """Removes partial directories whose owners have ended."""
    for left in parent.glob(f".*{_PARTIAL}"):
        fd = _lock(left, wait=None)
        if fd is not None:
            _remove(left)
            os.close(fd)


def _clear(path: Path) -> None:
    for entry in path.iterdir():
        if entry.name == _LOCK:
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _remove(path: Path) -> None:
    """Removes a partial directory, its lock file last, so that a new owner finds it empty or absent."""
    with contextlib.suppress(OSError):
        _clear(path)
        (path / _LOCK).unlink()
        path.rmdir()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
