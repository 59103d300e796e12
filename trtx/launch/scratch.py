"""A topology's temporary directory: created, locked, checked while serving, and created again if it is removed.

It contains the discovery records. Dynamo 1.6.1 watches the directory that it opened at its start (by inode) and writes
each record once. If the directory is removed, even if another one takes its name, frontends see no workers any more and
no worker registers again. So this module keeps the directory open and compares it with the one at its path.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import shutil
import stat
from pathlib import Path

from trtx.launch.disk_space import write_problem


class Scratch:
    """``directory``, and the buckets of Dynamo's file discovery under it."""

    def __init__(self, directory: Path, discovery_dir: Path) -> None:
        """Only stores the paths; :meth:`make` creates the directories."""
        self._directory = directory
        self._paths = (directory, discovery_dir, *(discovery_dir / "v1" / bucket for bucket in ("instances", "mdc")))
        self._held: dict[Path, int] = {}

    def make(self) -> None:
        """Creates the directories.

        Raises OSError if that fails or ``directory`` exists; nothing is left behind then.
        """
        self._directory.mkdir(mode=0o700, parents=True)
        try:
            for path in self._paths:
                path.mkdir(parents=True, exist_ok=True)
                self._held[path] = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            # systemd-tmpfiles skips locked directories and everything below them (tmpfiles.d(5)).
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(self._held[self._directory], fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            self.remove()
            raise

    def problem(self) -> str | None:
        """What happened to the directory, such as ``/tmp/x was removed``; None while it is the original one."""
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

    def start_problem(self) -> str | None:
        """Returns why a process that starts now could not register, or None.

        For example ``/tmp/x can't be written (No space left on device), …``. A worker of Dynamo 1.6.1 whose record
        can't be written exits with a traceback.
        """
        reason = write_problem(self._directory)
        if reason is None:
            return None
        return f"{self._directory} can't be written ({reason}), where it has to register; make room there"

    def make_again(self) -> None:
        """Replaces what is at the path now. Raises OSError."""
        self.remove()
        self.make()

    def remove(self) -> None:
        """Removes the directory, as far as the file system allows."""
        while self._held:
            os.close(self._held.popitem()[1])
        remove_own(self._directory)


def remove_own(directory: Path) -> str | None:
    """Removes a topology's directory and its contents if it is a directory of this user.

    In a shared temporary directory, another user may have created a directory with this name, and root could remove it
    by mistake. Returns why it was not removed, such as ``belongs to ada (uid 1000)``. Returns None if nothing is left,
    or if the rest could not be removed.
    """
    try:
        found = directory.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(found.st_mode):
        return "is a symbolic link" if stat.S_ISLNK(found.st_mode) else "is not a directory"
    if found.st_uid != os.geteuid():
        return f"belongs to {_user(found.st_uid)}"
    shutil.rmtree(directory, ignore_errors=True)
    return None


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
