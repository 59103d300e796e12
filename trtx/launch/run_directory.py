"""A run's directory ``<parent>/<utc>-<name>-<hash8>``: always a new one, restored if it is removed while serving."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import yaml

from trtx.topology import Plan, template_path


def new_run_directory(parent: Path, name: str) -> Path:
    """A path that does not exist yet. Creates nothing, so that a dry run leaves nothing behind."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return parent.absolute() / f"{stamp}-{name}-{secrets.token_hex(4)}"


class RunDirectory:
    """The files of one served plan: log and status directories, the plan, and each role's resolved config."""

    def __init__(self, plan: Plan) -> None:
        """Only computes the files' names and contents; :meth:`write` writes them."""
        used = (path for one in plan.processes for path in (one.log_path, one.status_file))
        self._directories = sorted({path.parent for path in used if path is not None})
        self._files = {
            plan.config_path(role): yaml.safe_dump(values, sort_keys=False)
            for role, values in plan.engine_configs.items()
        }
        if plan.chat_template is not None:
            self._files[template_path(plan.run_dir)] = plan.chat_template
        self._files[plan.run_dir / "plan.json"] = json.dumps(plan.to_json(), indent=2) + "\n"
        self._reported = ""

    def write(self) -> None:
        """Writes the directories and files, which the user may want to read and restarted workers need.

        Raises OSError.
        """
        self._make(self._directories, self._files)

    def mend(self) -> str | None:
        """Restores missing directories and files.

        Returns a message for the user, once each time something goes missing.
        """
        directories = [path for path in self._directories if _is_gone(path)]
        files = [path for path in self._files if _is_gone(path)]
        if not directories and not files:
            self._reported = ""
            return None
        message = f"{[*directories, *files][0]} was removed by something other than trtx"
        try:
            self._make(directories, files)
        except OSError as error:
            message += f", and can't be recreated ({os.strerror(error.errno or 0)}); the topology continues to serve"
        else:
            message += "; trtx recreated it"
            if directories:
                message += ", but the output of running processes is lost"
        is_news, self._reported = message != self._reported, message
        return message if is_news else None

    def start_problem(self) -> str | None:
        """The beginning of a sentence on why a new process would exit at once: a file that it needs can't be read.

        Else None.
        """
        for path in self._files:
            try:
                path.open("rb").close()
            except OSError as error:
                why = os.strerror(error.errno or 0)
                return f"{path} can't be read ({why}), but it is needed at the start; make it readable"
        return None

    def _make(self, directories: Iterable[Path], files: Iterable[Path]) -> None:
        for directory in directories:
            directory.mkdir(parents=True, exist_ok=True)
        for path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                beside.write_text(self._files[path], encoding="utf-8", newline="")  # a template keeps its line ends
                beside.replace(path)  # atomic, because a worker could otherwise start with half of a config
            except OSError:
                with contextlib.suppress(OSError):
                    beside.unlink()
                raise


def _is_gone(path: Path) -> bool:
    """Whether ``path`` is known to be missing; one that can't be examined now may exist."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
