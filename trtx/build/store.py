"""Where a build is made and where it ends up: one directory that is whole or not there.

A build is made in ``.<name>.partial`` beside its place, under a lock that the kernel drops with the processes that
hold it, and renamed when every byte is on the disk. What a killed build left is cleared by the next one.
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
    """A directory under way, ours alone. ``lock_fd`` may be handed to a child: the lock lasts as long as either."""

    def __init__(self, target: Path, path: Path, lock_fd: int) -> None:
        self.target, self.path, self.lock_fd = target, path, lock_fd

    def publish(self) -> None:
        """Puts every byte on the disk, then the directory in its place."""
        for directory, _, names in os.walk(self.path):
            for name in names:
                _sync(Path(directory) / name)
            _sync(Path(directory))
        self.path.rename(self.target)  # with the lock inside: whoever waits for it finds the build when it is dropped
        (self.target / _LOCK).unlink()
        _sync(self.target.parent)


@contextlib.contextmanager
def partial_directory(target: Path, *, on_wait: Callable[[], None]) -> Iterator[Partial | None]:
    """An empty directory to make ``target`` in, or None when ``target`` is there, maybe after waiting for its maker.

    Unless it was published, the directory is gone when the context ends. Raises UsageError where the parent can't be
    written.
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
    """Raises UsageError where the file system of ``parent`` has fewer than ``needed`` bytes free."""
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise no_space(parent, needed)


def no_space(parent: Path, needed: int) -> UsageError:
    """The error for a full disk, with what the build needs in all and what is free now."""
    free = shutil.disk_usage(parent).free
    return UsageError(
        f"the disk of {str(parent)!r} is full: the build needs about {needed:,} bytes and {free:,} are free; nothing "
        "was left there: make room, or name another directory with -o"
    )


def is_disk_full(error: BaseException) -> bool:
    """Also for safetensors, whose errors carry the system's error as text (seen: 0.8)."""
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
        if not target.is_dir():  # published since we looked
            _clear(path)
            return Partial(target, path, fd)
        _remove(path)
        os.close(fd)
    return None


def _lock(path: Path, *, wait: Callable[[], None] | None) -> int | None:
    """The lock of a partial directory; None when another process renamed or removed it, or (no ``wait``) holds it."""
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
    """Removes partial directories whose makers are gone."""
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
    """The lock goes last: whoever makes it anew meets an empty directory, or none."""
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
