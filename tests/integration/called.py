"""``trtx`` called in the test's process, as the tests of a verb use it that send it no signal: a start costs half a
second of CPU in imports. That it is a process of its own is seen where one is served, killed or interrupted."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from trtx.cli.app import run


@dataclass(frozen=True)
class Done:
    """What a call came to."""

    code: int
    out: str
    err: str


def call(
    *arguments: str,
    directory: Path | None = None,
    columns: int = 120,
    variables: Mapping[str, str | None] | None = None,
) -> Done:
    """``trtx ARGUMENTS`` in ``directory``; a variable of the environment that is None is taken out."""
    environment = {"COLUMNS": str(columns), **(variables or {})}
    # Files: what is shown goes to a descriptor.
    with pytest.MonkeyPatch.context() as patch, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        if directory is not None:
            patch.chdir(directory)
        for name, value in environment.items():
            if value is None:
                patch.delenv(name, raising=False)
            else:
                patch.setenv(name, value)
        with redirect_stdout(out), redirect_stderr(err):
            code = run(list(arguments))
        for file in (out, err):
            file.seek(0)
        return Done(code, out.read(), err.read())


def only(parent: Path) -> Path:
    """The run directory of the only run there."""
    (run_dir,) = parent.iterdir()
    return run_dir
