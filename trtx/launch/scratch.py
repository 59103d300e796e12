"""A topology's short-lived directory: made, held, missed when it goes, made again.

Discovery records lie in it. Dynamo 1.4.2 watches the directory that it found at its start (by inode) and writes each
record once: when the directory goes, and even when one of its name comes back, no frontend sees a worker any more and
no worker registers again. So a directory is held open here, and compared with what its path leads to.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import shutil
import stat
from pathlib import Path

from trtx.launch.room import write_problem


class Scratch:
    """``directory`` and, under it, the buckets of Dynamo's file discovery."""

    def __init__(self, directory: Path, discovery_dir: Path) -> None:
        """Makes nothing yet."""
        self._directory = directory
        self._paths = (directory, discovery_dir, *(discovery_dir / "v1" / bucket for bucket in ("instances", "mdc")))
        self._held: dict[Path, int] = {}

    def make(self) -> None:
        """Raises OSError, of which nothing is left behind, where it can't be made or is there already."""
        self._directory.mkdir(mode=0o700, parents=True)
        try:
            for path in self._paths:
                path.mkdir(parents=True, exist_ok=True)
                self._held[path] = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            # What systemd-tmpfiles finds locked it leaves alone, and everything below it (tmpfiles.d(5)).
            with contextlib.suppress(OSError):  # some network file systems know no locks
                fcntl.flock(self._held[self._directory], fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            self.remove()
            raise

    def problem(self) -> str | None:
        """What has become of it, as ``/tmp/x was removed``; None while it is the one that was made."""
        for path, descriptor in self._held.items():
            try:
                if not os.path.samestat(path.stat(), os.fstat(descriptor)):
                    return f"{path} was removed by something other than trtx, and another is in its place"
                if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
                    return f"{path} can't be written any more"
            except FileNotFoundError:
                return f"{path} was removed by something other than trtx"
            except OSError as error:
                return f"{path} can't be reached any more ({os.strerror(error.errno or 0)})"
        return None

    def shortage(self) -> str | None:
        """Why a process that starts now could not register: ``/tmp/x can't be written (No space left on device), …``.
        None where it can. A worker of Dynamo 1.4.2 whose record can't be written ends with a traceback."""
        reason = write_problem(self._directory)
        if reason is None:
            return None
        return f"{self._directory} can't be written ({reason}), where it has to register; make room there"

    def make_again(self) -> None:
        """In place of what is there now. Raises OSError."""
        self.remove()
        self.make()

    def remove(self) -> None:
        """Leaves nothing, where the file system lets it."""
        while self._held:
            os.close(self._held.popitem()[1])
        remove_own(self._directory)


def remove_own(directory: Path) -> str | None:
    """Removes a topology's directory with all that is in it, where it is a directory of this user: in a temporary
    directory anybody may have made one of its name, and root could remove that too. Returns why it is left, such as
    ``belongs to ada (uid 1000)``; None where nothing is there any more, or what is left could not be removed."""
    try:
        found = directory.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(found.st_mode):
        return "is a symbolic link" if stat.S_ISLNK(found.st_mode) else "is no directory"
    if found.st_uid != os.geteuid():
        return f"belongs to {_user(found.st_uid)}"
    shutil.rmtree(directory, ignore_errors=True)
    return None


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
