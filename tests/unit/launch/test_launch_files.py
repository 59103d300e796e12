"""What a topology keeps on disk, when something else removes it or the disk is full: logs, its directories, its run."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launch_builders import plan_of, process

from trtx.errors import UsageError
from trtx.launch.frontend_log import FrontendLog
from trtx.launch.guardian import Guardian
from trtx.launch.leftovers import clear_leftovers
from trtx.launch.logs import Log
from trtx.launch.run_directory import RunDirectory
from trtx.launch.scratch import Scratch
from trtx.launch.served import take_place
from trtx.topology import Plan

pytestmark = pytest.mark.slow


def say(log: Log, text: str) -> None:
    """As a process does whose output goes there."""
    subprocess.run([sys.executable, "-c", f"print({text!r})"], stdout=log.fileno(), check=False, stderr=-3)


def test_last_words_are_those_of_this_life_alone(tmp_path: Path) -> None:
    first = Log(tmp_path / "agg-0.log")
    say(first, "CUDA error: out of memory")
    assert "its last lines:\nCUDA error: out of memory" in first.last_words("agg-0 exited 4")
    second = Log(tmp_path / "agg-0.log")
    assert second.tail() == ""
    assert second.last_words("agg-0 was killed").endswith("it is empty")
    assert (tmp_path / "agg-0.log").read_text().splitlines()[1:] == ["trtx: agg-0 exited 4", "trtx: agg-0 was killed"]


def test_a_log_on_a_full_disk_is_not_called_empty(tmp_path: Path) -> None:
    (tmp_path / "agg-0.log").symlink_to("/dev/full")
    log = Log(tmp_path / "agg-0.log")
    say(log, "what nobody will read")
    words = log.last_words("agg-0 exited 4")
    assert "can't be written (No space left on device), so its last output is lost" in words
    assert "nothing" not in words


def test_a_log_that_cannot_be_opened_lets_its_process_start_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the directory should be")
    log = Log(tmp_path / "logs" / "agg-0.log")
    say(log, "lost")
    words = log.last_words("agg-0 exited 4")
    assert "can't be written (" in words
    assert "removed" not in words


def test_a_log_that_was_removed_keeps_its_last_lines(tmp_path: Path) -> None:
    log = Log(tmp_path / "agg-0.log")
    (tmp_path / "agg-0.log").unlink()
    say(log, "still said")
    words = log.last_words("agg-0 exited 4")
    assert "(removed while it ran)" in words
    assert words.endswith("still said")


def test_a_frontends_log_tells_what_it_refused_and_its_last_error(tmp_path: Path) -> None:
    log = Log(tmp_path / "frontend.log")
    seen = FrontendLog(log)
    with (tmp_path / "frontend.log").open("a") as written:  # lines of Dynamo 1.6.1, one in two parts
        written.write("2026-11-21T21:24:31Z ERROR dynamo_runtime::storage: watch failed\n")
        written.write("2026-11-21T21:24:31Z ERROR dynamo_llm::http: http response sent status=404 latency_ms=0\n")
        written.write("2026-11-21T21:24:31Z  WARN dynamo_llm::discovery::controller: Model materialization failed; sch")
        written.flush()
        seen.look()
        assert (seen.refusal, seen.last_error) == ("", "watch failed")
        written.write('eduling retry attempt=1 retry_ms=1000 error="prompt_formatter_from_mdc: no \\"{%\\""\n')
    seen.look()
    assert seen.refusal == 'prompt_formatter_from_mdc: no "{%"'


def test_a_frontends_log_of_json_tells_the_same(tmp_path: Path) -> None:
    log = Log(tmp_path / "frontend.log")
    seen = FrontendLog(log)
    with (tmp_path / "frontend.log").open("a") as written:  # as Dynamo 1.6.1 writes with DYN_LOGGING_JSONL
        written.write('{"level":"ERROR","target":"a","message":"watch failed"}\n')
        written.write('{"level":"ERROR","target":"a","message":"http response sent","status":"404"}\n')
        written.write('{"level":"WARN","message":"Model materialization failed; scheduling","error":"no \\"{%\\""}\n')
        written.write('{"level":"WARN"}\n{half\n')
    seen.look()
    assert (seen.refusal, seen.last_error) == ('no "{%"', "watch failed")


def scratch_in(tmp_path: Path) -> Scratch:
    scratch = Scratch(tmp_path / "scratch", tmp_path / "scratch" / "kv")
    scratch.make()
    return scratch


@pytest.mark.parametrize("removed", ["scratch", "scratch/kv", "scratch/kv/v1/instances", "scratch/kv/v1/mdc"])
def test_a_removed_directory_is_missed_even_where_one_of_its_name_came_back(tmp_path: Path, removed: str) -> None:
    scratch = scratch_in(tmp_path)
    try:
        assert scratch.problem() is None
        shutil.rmtree(tmp_path / removed)
        assert f"{tmp_path / removed} was removed by something other than trtx" in str(scratch.problem())
        (tmp_path / removed).mkdir(parents=True)
        assert "and another is in its place" in str(scratch.problem())
        scratch.make_again()
        assert scratch.problem() is None
    finally:
        scratch.remove()
    assert not (tmp_path / "scratch").exists()


def test_a_path_that_leads_nowhere_is_a_problem_and_making_it_again_says_why(tmp_path: Path) -> None:
    scratch = scratch_in(tmp_path)
    shutil.rmtree(tmp_path / "scratch")
    (tmp_path / "scratch").write_text("something else's file")
    assert scratch.problem() is not None
    with pytest.raises(FileExistsError):
        scratch.make_again()


def test_cleaners_that_ask_for_locks_leave_it_alone(tmp_path: Path) -> None:
    scratch = scratch_in(tmp_path)
    descriptor = os.open(tmp_path / "scratch", os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        scratch.remove()
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def test_a_run_directory_that_was_removed_is_made_again_and_told_once_each_time(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, process(tmp_path, "agg-0"))
    run = RunDirectory(plan)
    run.write()
    assert run.mend() is None
    for _ in range(2):
        shutil.rmtree(plan.run_dir)
        assert "was removed by something other than trtx; trtx recreated it, but the output of running" in str(
            run.mend()
        )
        assert run.mend() is None
        assert (plan.run_dir / "serve" / "logs").is_dir()
        assert (plan.run_dir / "plan.json").read_text().startswith("{")


def test_a_run_directory_that_cannot_be_made_again_is_told_once(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, process(tmp_path, "agg-0"))
    run = RunDirectory(plan)
    run.write()
    shutil.rmtree(plan.run_dir)
    plan.run_dir.write_text("a file in its place")
    assert "can't be recreated (" in str(run.mend())
    assert run.mend() is None


def share_of(tmp_path: Path) -> Plan:
    return replace(plan_of(tmp_path, process(tmp_path, "agg-0")), this_host="node1")


def test_what_a_cut_share_of_this_user_left_is_cleared(tmp_path: Path) -> None:
    share = share_of(tmp_path)
    (share.scratch_dir / "kv" / "v1").mkdir(parents=True)
    clear_leftovers(share)
    assert not share.scratch_dir.exists()
    clear_leftovers(share)


@pytest.mark.parametrize("whose", ["another user's", "a symbolic link", "a file"])
def test_what_is_not_this_users_directory_is_never_removed_for_its_name(whose: str, tmp_path: Path) -> None:
    share = share_of(tmp_path)
    kept = tmp_path / "precious"
    kept.mkdir()
    (kept / "work").write_text("of weeks")
    match whose:
        case "another user's":
            if os.geteuid() != 0:
                pytest.skip("root alone can give a directory to another user")
            share.scratch_dir.mkdir()
            (share.scratch_dir / "work").write_text("of weeks")
            os.chown(share.scratch_dir, 65534, 65534)
            expected = r"belongs to (nobody \(uid 65534\)|uid 65534)"
        case "a symbolic link":
            share.scratch_dir.symlink_to(kept)
            expected = "is a symbolic link"
        case _:
            share.scratch_dir.write_text("of weeks")
            expected = "is not a directory"
    with pytest.raises(UsageError, match=expected) as error:
        clear_leftovers(share)
    assert str(share.scratch_dir) in str(error.value) and "TMPDIR" in str(error.value)
    Scratch(share.scratch_dir, share.discovery_dir).remove()
    assert share.scratch_dir.lstat() and (kept / "work").read_text() == "of weeks"
    guardian = [sys.executable, "-m", "trtx.launch.guardian", "--marker", "NOBODY=here", "--scratch"]
    subprocess.run([*guardian, str(share.scratch_dir)], stdin=subprocess.DEVNULL, check=True, timeout=60)
    assert share.scratch_dir.lstat() and (kept / "work").read_text() == "of weeks"
    if whose == "another user's":
        assert (share.scratch_dir / "work").read_text() == "of weeks"


def test_a_second_share_of_one_host_is_told_of_the_first_and_not_of_its_ports(tmp_path: Path) -> None:
    variable, _, value = share_of(tmp_path).marker.partition("=")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        frontend = replace(process(tmp_path, "frontend", role="frontend"), http_host="127.0.0.1", http_port=port)
        share = replace(share_of(tmp_path), processes=(frontend,))
        with pytest.raises(UsageError, match=f"port {port} on 127.0.0.1 is in use"):
            take_place(share)
        waits = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
        first = subprocess.Popen(
            waits, env={**os.environ, variable: value}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert first.stdin is not None and first.stdout is not None
        try:
            first.stdout.readline()
            left = (
                rf"are on node1 already \(pid {first.pid}\), but neither their launcher nor its guardian; `trtx doctor`"
            )
            with pytest.raises(UsageError, match=left):
                take_place(share)
            watches = Guardian(share.marker, share.scratch_dir)
            try:
                with pytest.raises(
                    UsageError, match=f"already runs on node1 as pid {os.getpid()}; stop that process first"
                ):
                    take_place(share)
            finally:
                watches.goodbye()
            command = [sys.executable, "-m", "trtx.launch.guardian", "--marker", share.marker, "--launcher", "1"]
            command += ["--scratch", str(share.scratch_dir)]
            with subprocess.Popen(command, stdin=subprocess.PIPE) as orphan:
                try:
                    with pytest.raises(UsageError, match=rf"is being stopped on node1 \(pid {first.pid}\)"):
                        take_place(share)
                finally:
                    orphan.communicate(b"goodbye\n", timeout=60)
        finally:
            first.stdin.close()
            first.stdout.close()
            first.wait(30)
