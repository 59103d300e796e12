"""Reads ``file:`` URLs below one allowed directory."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from trtx.config.media import MediaLimits
from trtx.media.errors import MediaError, too_large

_PIECE_BYTES = 1 << 20
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# non-blocking, because opening a pipe without a writer would hang
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


async def read(url: str, label: str, limits: MediaLimits) -> bytes:
    """The file's bytes. Raises MediaError: 403 for a path outside the directory, whether it exists or not, 404, 413."""
    try:
        async with asyncio.timeout(limits.media_timeout_s):
            return await asyncio.to_thread(_read, url, label, limits)
    except TimeoutError:
        raise MediaError(408, f"{label} was not read after {limits.media_timeout_s:g} s") from None


def _read(url: str, label: str, limits: MediaLimits) -> bytes:
    allowed = limits.allowed_media_path
    if allowed is None:
        raise MediaError(403, f"{label} is a local file; send a data: URL, or start with --allowed-media-path")
    try:
        parts = urlsplit(url)
        path = unquote(parts.path, errors="strict")
    except ValueError:
        raise MediaError(400, f"{label} is not a valid URL") from None
    if parts.netloc.lower() not in ("", "localhost") or not path.startswith("/") or "\0" in path:
        raise MediaError(400, f"{label} does not name a file on this machine; expected file:///directory/file")
    if parts.query or parts.fragment:
        raise MediaError(400, f"{label} contains ? or #; write them as %3F and %23")
    try:
        root = allowed.resolve()
        inside = Path(path).resolve().relative_to(root)
    except ValueError:
        raise MediaError(403, f"{label} is outside the directory of --allowed-media-path") from None
    except (OSError, RuntimeError):  # a name that is too long, or a cycle of links
        raise _not_there(label) from None
    descriptor = _open_inside(root, inside, label)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise MediaError(403, f"{label} is not a regular file")
        if found.st_size > limits.max_media_bytes:
            raise too_large(label, limits.max_media_bytes)
        return _contents(descriptor, label, limits)
    except OSError:
        raise _not_there(label) from None
    finally:
        os.close(descriptor)


def _open_inside(root: Path, inside: Path, label: str) -> int:
    """Opens the file by walking down from ``root`` one name at a time, without following any link.

    ``inside`` is already resolved, so a link found now was created in the meantime and could lead anywhere.
    """
    try:
        folder = os.open(root, _FOLDER)
        try:
            for name in inside.parts[:-1]:
                below = os.open(name, _FOLDER, dir_fd=folder)
                os.close(folder)
                folder = below
            return os.open(inside.name or ".", _FILE, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError:
        raise _not_there(label) from None


def _contents(descriptor: int, label: str, limits: MediaLimits) -> bytes:
    chunks, size = [], 0
    while chunk := os.read(descriptor, _PIECE_BYTES):
        size += len(chunk)
        if size > limits.max_media_bytes:  # the file grows while it is read
            raise too_large(label, limits.max_media_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _not_there(label: str) -> MediaError:
    return MediaError(404, f"{label} does not exist or can't be read")
