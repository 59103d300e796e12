"""Every command of README, the quickstart and the guides that needs neither a GPU nor a cluster runs as it stands."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from called import call
from processes import free_port, until

from tests.documented_commands import ANY_VERDICT, NOT_RUN, PAGES, ROOT, Command, commands_of

LONG = {
    "quickstart.md",
    "serve.md",
    "disaggregate.md",
    "measure.md",
    "gate-ci.md",
    "compare-builds.md",
    "images.md",
    "quantize.md",
    "evaluate.md",
    "debug.md",
    "structured-output.md",
    "tools.md",
    "overload.md",
    "speculation.md",
    "several-hosts.md",
    "sleep-and-wake.md",
}
SERVES_S = 120.0
ONE_S = 600.0
NEEDS_A_RUN = re.compile(r"builds/|--baseline |--url ")


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.proof if page.name in LONG else ()) for page in PAGES],
    ids=lambda p: p.name,
)
def test_the_commands_of_a_page_run_in_their_order(page: Path, tmp_path: Path) -> None:
    (tmp_path / "sweeps").symlink_to(ROOT / "sweeps")
    port = free_port()
    with contextlib.ExitStack() as served:
        for command in commands_of(page):
            line = command.line.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
            if not command.is_run or line.startswith("pip install"):
                continue
            if command.serves:
                served.close()  # one topology at a time has the port
                served.enter_context(_serving(f"{line} --port {port}", tmp_path))
            else:
                _run(command, line, tmp_path)


def _run(command: Command, line: str, directory: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", line], cwd=directory, env=_environment(), capture_output=True, text=True, timeout=ONE_S
    )
    said = f"{command.page.name}: {line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    if command.reason == ANY_VERDICT:
        assert done.returncode in (0, 1, 3) or (done.returncode == 2 and "trials" in done.stderr), said
    elif command.words[:2] == ["trtx", "doctor"]:
        assert done.returncode in (0, 4), said  # of this machine
    else:
        assert done.returncode == 0, said
    if line.startswith("curl"):
        assert '"choices"' in done.stdout, said


@contextlib.contextmanager
def _serving(line: str, directory: Path) -> Iterator[None]:
    log = directory / "serve.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {line}"], cwd=directory, env=_environment(), stdout=file, stderr=subprocess.STDOUT
        )
    try:

        def ready() -> bool:
            assert process.poll() is None, log.read_text()
            return "Ready: " in log.read_text()

        until(f"{line} is ready", ready, seconds=SERVES_S, every=0.2)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


PLANNED = {  # each command once, of whichever page
    command.line: command
    for page in PAGES
    for command in commands_of(page)
    if command.is_run and command.words[:2] in (["trtx", "bench"], ["trtx", "serve"])
    if not NEEDS_A_RUN.search(command.line) and " ab " not in command.line
}


@pytest.mark.parametrize("command", PLANNED.values(), ids=lambda command: f"{command.page.name} {command.line}")
def test_a_command_can_be_planned(command: Command, tmp_path: Path) -> None:
    (tmp_path / "sweeps").symlink_to(ROOT / "sweeps")
    words = command.words[1:]
    done = call(*words, *([] if "--dry-run" in words else ["--dry-run"]), directory=tmp_path)
    assert done.code == 0, done.err


def test_every_page_has_a_command_to_paste() -> None:
    for page in PAGES:
        commands = list(commands_of(page))
        assert any(command.is_run for command in commands), f"{page.name} has no bash block that a reader can paste"
        unknown = {command.reason for command in commands} - NOT_RUN - {ANY_VERDICT, None}
        assert not unknown, f"{page.name}: {unknown}; expected one of {sorted(NOT_RUN)}"
