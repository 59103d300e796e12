"""Files that a running topology needs or writes are taken away: told truly, healed where it can be, never its end."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from processes import TRTX
from topology_clients import PACED, nothing_left, stream_once, trtx_serve, wait_until

from trtx.checkpoint import resolve_checkpoint
from trtx.topology import Plan

FULL_BYTES = 1 << 20


def reported_pid(status: Path) -> int | None:
    """None while there is no status file: a restart removes it."""
    try:
        return int(json.loads(status.read_text())["pid"])
    except FileNotFoundError:
        return None


def is_served(plan: Plan) -> bool:
    return stream_once(plan.url, plan.model, "hello", 3).is_good


def test_a_full_disk_under_its_output_ends_no_topology_and_the_gap_is_told() -> None:
    with trtx_serve(*PACED) as serve:
        plan = serve.wait_ready()
        status = plan.workers[0].status_file
        assert status is not None

        def kill_the_worker() -> None:
            pid = reported_pid(status)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: reported_pid(status) not in (None, pid), 30, "another worker")
            wait_until(lambda: is_served(plan), 30, "a good request")

        # As with a disk that is full: no byte more fits into the file. What else is written is smaller, and fits.
        with serve.output.open("ab") as output:
            output.write(b"\n" * (FULL_BYTES - output.tell()))
        limits = resource.prlimit(serve.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(serve.process.pid, resource.RLIMIT_FSIZE, (FULL_BYTES, limits[1]))
        before = serve.text()
        kill_the_worker()
        assert serve.text() == before
        assert serve.process.poll() is None
        resource.prlimit(serve.process.pid, resource.RLIMIT_FSIZE, limits)
        kill_the_worker()
        wait_until(lambda: "messages were left out here: File too large\n" in serve.text(), 10, "the gap told")
        serve.process.send_signal(signal.SIGINT)
        assert serve.wait(30) == 130
        assert nothing_left(plan)


@pytest.mark.proof
def test_what_something_else_removes_or_fills_is_told_truly_and_healed(tmp_path: Path) -> None:
    with trtx_serve(*PACED) as serve:
        plan = serve.wait_ready()
        logs, status = plan.workers[0].log_path.parent, plan.workers[0].status_file
        assert status is not None

        def heal(times: int, what: str) -> None:
            wait_until(lambda: serve.text().count("the topology is whole again: a request") == times, 30, what)
            assert is_served(plan), what

        aside = plan.run_dir.rename(tmp_path / "aside")  # at once: what runs makes parts of it again
        shutil.rmtree(aside)
        wait_until(lambda: "trtx recreated it, but the output of running processes is lost" in serve.text(), 10, "told")
        wait_until(status.exists, 10, "the status file again")
        assert is_served(plan)

        shutil.rmtree(plan.scratch_dir)  # as a cleaner of temporary files does
        heal(1, "after its own directory was removed")
        assert f"because {plan.scratch_dir} was removed by something other than trtx" in serve.text()
        assert "frozen" not in serve.text()

        log = logs / "agg-0.log"
        log.unlink()
        log.symlink_to("/dev/full")
        shutil.rmtree(status.parent)
        status.parent.write_text("no directory, so that no status file can be written, by root either")
        os.kill(serve.pid_of("agg-0"), signal.SIGKILL)
        heal(2, "without a log and a status file")
        os.kill(serve.pid_of("agg-0"), signal.SIGKILL)
        heal(3, "once more")
        assert "which can't be written (No space left on device), so its last output is lost" in serve.text()
        assert serve.process.poll() is None


def test_a_broken_chat_template_ends_the_launch_with_the_frontends_own_sentence(tmp_path: Path) -> None:
    model = tmp_path / "broken"
    shutil.copytree(resolve_checkpoint("synthetic:tiny").path, model)
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content ")
    with trtx_serve(*PACED, "--model", str(model)) as serve:
        assert serve.wait(60) == 4, serve.text()
        told = serve.text().splitlines()[-1]
    assert told.startswith("trtx: the frontend can't serve broken: ")
    assert "syntax error: unexpected end of input" in told
    assert f"correct the chat template or the tokenizer files in {model}" in told


def test_a_run_directory_without_room_is_one_sentence_of_bench(tmp_path: Path) -> None:
    resolve_checkpoint("synthetic:tiny")  # into its cache, before files may hold next to nothing
    command = [*TRTX, "bench", "--engine", "paced", "--model", "synthetic:tiny", "-o", str(tmp_path / "runs")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)),
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"trtx: run directory {tmp_path / 'runs'}")
    assert "can't be written (File too large), so the run ended; make room there" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "runs").iterdir()) == []
