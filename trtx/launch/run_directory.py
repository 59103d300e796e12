"""Where a run keeps what it leaves: ``<parent>/<utc>-<name>-<hash8>``, always a new one, and there while it serves."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import yaml

from trtx.topology import Plan


def new_run_directory(parent: Path, name: str) -> Path:
    """A path that does not exist yet. Creates nothing: a dry run leaves nothing behind."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return parent.absolute() / f"{stamp}-{name}-{secrets.token_hex(4)}"


class RunDirectory:
    """The files of one served plan: directories of logs and status files, the plan, each role's resolved config."""

    def __init__(self, plan: Plan) -> None:
        """Makes nothing yet."""
        used = (path for one in plan.processes for path in (one.log_path, one.status_file))
        self._directories = sorted({path.parent for path in used if path is not None})
        self._files = {
            plan.config_path(role): yaml.safe_dump(values, sort_keys=False)
            for role, values in plan.engine_configs.items()
        }
        self._files[plan.run_dir / "plan.json"] = json.dumps(plan.to_json(), indent=2) + "\n"
        self._told = ""

    def write(self) -> None:
        """What a person may want to read beside the logs, and a worker that starts again needs. Raises OSError."""
        self._make(self._directories, self._files)

    def mend(self) -> str | None:
        """Makes again what is missing; a sentence about it for a person, once for each time it goes missing."""
        directories = [path for path in self._directories if _is_gone(path)]
        files = [path for path in self._files if _is_gone(path)]
        if not directories and not files:
            self._told = ""
            return None
        told = f"{[*directories, *files][0]} was removed by something other than trtx"
        try:
            self._make(directories, files)
        except OSError as error:
            told += f", and can't be made again ({os.strerror(error.errno or 0)}); the topology serves on"
        else:
            told += "; it was made again"
            if directories:
                told += ", but what running processes log is lost"
        is_news, self._told = told != self._told, told
        return told if is_news else None

    def shortage(self) -> str | None:
        """Why a process that starts now would end at once: a file that it starts with can't be read. None: all can."""
        for path in self._files:
            try:
                path.open("rb").close()
            except OSError as error:
                return f"{path} can't be read ({os.strerror(error.errno or 0)}), which it starts with; make it readable"
        return None

    def _make(self, directories: Iterable[Path], files: Iterable[Path]) -> None:
        for directory in directories:
            directory.mkdir(parents=True, exist_ok=True)
        for path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                beside.write_text(self._files[path], encoding="utf-8")
                beside.replace(path)  # whole or not at all: a worker would start with half of a config
            except OSError:
                with contextlib.suppress(OSError):
                    beside.unlink()
                raise


def _is_gone(path: Path) -> bool:
    """True where it is known to be; a path that can't be looked at now may be there."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
