"""The aiperf process's life, with small real processes in aiperf's place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from trtx.bench import LoadSpec, Target, sweep
from trtx.bench.aiperf.command import check_endpoint, command, complaint
from trtx.bench.aiperf.process import Aiperf, AiperfHost
from trtx.bench.aiperf.warm_host import FAILED
from trtx.bench.endpoint import API_KEY_VARIABLE
from trtx.errors import LoadGeneratorError, UsageError
from trtx.experiment import ExperimentSpec, run
from trtx.experiment.bench.dry_run import plan_only

pytestmark = pytest.mark.slow

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
                          "print('child', flush=True); time.sleep(60)"])
print("ready", os.getpid(), child.pid, flush=True)
time.sleep(60)
"""


def _until(path: Path, words: tuple[str, ...], look: Callable[[], object]) -> str:
    deadline = time.monotonic() + 20
    text = ""
    while time.monotonic() < deadline:
        look()
        text = path.read_text() if path.exists() else ""
        if all(word in text for word in words):
            return text
        time.sleep(0.02)
    raise AssertionError(f"{path} never said {words}: {text!r}")


class Start(Protocol):
    def __call__(self, body: str, api_key: str | None = None) -> AiperfHost: ...


@pytest.fixture
def host_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """A running host whose program is a function of this text."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with ExitStack() as cleanup:

        def start(body: str, api_key: str | None = None) -> AiperfHost:
            (tmp_path / "program.py").write_text(f"import os, sys\ndef main():\n{textwrap.indent(body, '    ')}\n")
            host = AiperfHost(tmp_path / "host.log", api_key=api_key, program=("program:main",))
            return cleanup.enter_context(host)

        yield start


def _exit_code(process: Aiperf) -> int:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (code := process.poll(0.05)) is not None:
            return code
    raise AssertionError("it never ended")


def test_leaving_the_context_ends_the_whole_session_even_if_it_ignores_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_of: Start
) -> None:
    monkeypatch.setattr("trtx.bench.aiperf.process.GRACE_S", 0.3)
    log = tmp_path / "aiperf.log"
    with Aiperf(host_of(STUBBORN), ("stubborn",), log) as process:
        text = _until(log, ("ready", "child\n"), lambda: process.poll(0.02))
        pids = [int(pid) for pid in text.split("ready ")[1].split()[:2]]
        assert process.poll() is None
    for pid in pids:
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_calls_of_one_host_follow_each_other_each_with_its_arguments_and_its_log(
    tmp_path: Path, host_of: Start
) -> None:
    host = host_of("print(sys.argv[1:], os.getpid() == os.getsid(0)); sys.exit(int(sys.argv[1]))")
    for code in (0, 3):
        with Aiperf(host, ("program", str(code)), tmp_path / f"{code}.log") as process:
            assert _exit_code(process) == code
        assert (tmp_path / f"{code}.log").read_text() == f"['{code}'] True\n"


def test_a_program_that_raises_has_its_traceback_in_its_log(tmp_path: Path, host_of: Start) -> None:
    with Aiperf(host_of("raise OSError('boom')"), ("program",), tmp_path / "aiperf.log") as process:
        assert _exit_code(process) == FAILED
    assert (tmp_path / "aiperf.log").read_text().endswith("OSError: boom\n")


# It kills its host before that was given the time to say whom it has forked, and leaves a child behind.
MURDERER = """
import os, signal, subprocess, sys, time
os.register_at_fork(after_in_parent=lambda: time.sleep(0.5))
def main():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(os.getpid(), child.pid, flush=True)
    os.kill(HOST, signal.SIGKILL)
    signal.pause()
HOST = os.getpid()
"""


def test_a_host_that_dies_before_it_has_named_its_fork_is_an_end_of_the_call_and_of_all_that_it_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text(MURDERER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    log = tmp_path / "log"
    with AiperfHost(tmp_path / "host.log", program=("program:main",)) as host, Aiperf(host, ("x",), log) as process:
        assert _exit_code(process) == -signal.SIGKILL
    _all_end(log.read_text())


def test_a_call_left_while_its_host_imports_is_never_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program.py").write_text(
        "import os, pathlib, sys, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)\n"
        "def main(): print('made'); sys.exit(int(sys.argv[1]))"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with AiperfHost(tmp_path / "host.log", program=("program:main",)) as host:
        with Aiperf(host, ("program", "3"), tmp_path / "left.log") as left:
            assert left.poll(0.05) is None
        (tmp_path / "go").touch()
        with Aiperf(host, ("program", "4"), tmp_path / "next.log") as process:
            assert _exit_code(process) == 4
    assert (tmp_path / "left.log").read_text() == ""
    assert (tmp_path / "next.log").read_text() == "made\n"


def test_what_a_host_runs_dies_with_it_where_nobody_is_left_to_end_it(tmp_path: Path, host_of: Start) -> None:
    host = host_of("print(os.getppid(), os.getpid(), flush=True)\nimport time; time.sleep(600)")
    log = tmp_path / "log"
    host.call(("program",), log)  # by hand, as if the launcher had stopped: nobody listens to what the host says
    text = _until(log, ("\n",), lambda: None)
    os.kill(int(text.split()[0]), signal.SIGKILL)
    _all_end(text.split()[1])


def test_a_call_that_nobody_asked_about_ends_whole_and_so_does_one_with_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text(f"def main():\n{textwrap.indent(STUBBORN, '    ')}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("trtx.bench.aiperf.process.GRACE_S", 0.3)
    with AiperfHost(tmp_path / "host.log", program=("program:main",)) as host:
        while not host.is_ready:
            assert host.replies(30) == []
        with Aiperf(host, ("x",), tmp_path / "first"):
            text = _until(tmp_path / "first", ("ready", "child\n"), lambda: None)
        _all_end(text.split("ready ")[1].removesuffix("child\n"))
        host.call(("x",), tmp_path / "second")
        text = _until(tmp_path / "second", ("ready", "child\n"), lambda: None)
    _all_end(text.split("ready ")[1].removesuffix("child\n"))


def _all_end(pids: str) -> None:
    for pid in map(int, pids.split()):
        with suppress(psutil.NoSuchProcess):
            try:
                psutil.Process(pid).wait(20)
            except psutil.TimeoutExpired:
                os.kill(pid, signal.SIGKILL)
                raise


def test_a_host_whose_launcher_dies_ends_what_it_runs(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os, time\ndef main(): print(os.getpid(), flush=True); time.sleep(60)")
    launcher = (
        "import sys; from pathlib import Path; from trtx.bench.aiperf.process import Aiperf, AiperfHost\n"
        f"at = Path({str(tmp_path)!r})\n"
        "with AiperfHost(at / 'host.log', program=('program:main',)) as host, Aiperf(host, ['x'], at / 'log') as one:\n"
        "    while one.poll(0.1) is None: pass\n"
    )
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as scratch:  # no guardian is there to remove what is left
        process = subprocess.Popen(
            [sys.executable, "-c", launcher], env={**os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": scratch}
        )
        pid = int(_until(tmp_path / "log", ("\n",), lambda: process.poll()))
        process.kill()
        process.wait()
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(20)


def test_what_is_absent_while_all_is_imported_can_be_imported_by_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wanted.py").write_text("said = 'here'")
    (tmp_path / "program.py").write_text(
        "try: import wanted\nexcept ImportError: found = 'absent'\n"
        "def main():\n    import wanted\n    print(found, wanted.said)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    log = tmp_path / "log"
    with (
        AiperfHost(tmp_path / "host.log", program=("program:main", "-wanted")) as host,
        Aiperf(host, ("program",), log) as process,
    ):
        assert _exit_code(process) == 0
    assert log.read_text() == "absent here\n"


def test_a_host_without_a_call_ends_at_once_though_it_still_imports(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)")
    sessions: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        host = AiperfHost(tmp_path / "host.log", lambda scratch: sessions.append, program=("slow:main",))
        with host, Aiperf(host, ("slow",), tmp_path / "log") as call:
            assert call.poll(0.1) is None
    assert not psutil.pid_exists(sessions[0]) and not host.scratch.exists()


def test_its_guard_is_there_before_there_is_anything_to_leave_behind(tmp_path: Path) -> None:
    seen: list[bool] = []

    def guard(scratch: Path) -> Callable[[int], None]:
        seen.append(scratch.exists())
        return lambda session: seen.append(scratch.is_dir() and psutil.pid_exists(session))

    with AiperfHost(tmp_path / "host.log", guard, program=("time:sleep",)):
        assert seen == [False, True]


def test_its_temporary_files_go_with_each_call_and_its_log_stays(tmp_path: Path, host_of: Start) -> None:
    host = host_of("import tempfile; print(tempfile.mkdtemp(), tempfile.mkstemp()[1]); print(os.environ['TMPDIR'])")
    log = tmp_path / "logs" / "aiperf.log"
    with Aiperf(host, ("program",), log) as process:
        assert _exit_code(process) == 0
        directory, file, scratch = (Path(name) for name in log.read_text().split())
        assert directory.is_dir() and file.is_file() and directory.parent == file.parent == scratch == host.scratch
    assert scratch.is_dir() and not any(scratch.iterdir())


def test_aiperf_sees_no_offline_switch_and_no_remote_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_of: Start
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    host = host_of("print(os.environ.get('HF_HUB_OFFLINE'), os.environ['HF_ENDPOINT'])")
    with Aiperf(host, ("program",), tmp_path / "aiperf.log") as process:
        assert _exit_code(process) == 0
    assert (tmp_path / "aiperf.log").read_text() == "None http://127.0.0.1:9\n"
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_aiperf_prints_the_lines_of_its_table_whatever_encoding_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_of: Start
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    host = host_of("print('┏━')")
    with Aiperf(host, ("program",), tmp_path / "aiperf.log") as process:
        assert _exit_code(process) == 0
    assert (tmp_path / "aiperf.log").read_text(encoding="utf-8") == "┏━\n"


@pytest.mark.parametrize("key", ["sk-1", None])
def test_aiperf_gets_the_key_of_this_server_alone_and_not_by_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_of: Start, key: str | None
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "sk-of-another-run")
    host = host_of(f"print({{'sk-1': 'this', None: 'none'}}.get(os.environ.get('{API_KEY_VARIABLE}'), 'another'))", key)
    with Aiperf(host, ("program",), tmp_path / "aiperf.log") as process:
        assert _exit_code(process) == 0
    assert (tmp_path / "aiperf.log").read_text() == ("this\n" if key else "none\n")
    target = Target("http://127.0.0.1:9", "tiny", Path("tokenizer"), "attached", api_key="sk-1")
    spec = LoadSpec(concurrency=(1,))
    argv = command(target, spec, spec.loads[0], 1, tmp_path)
    assert "sk-1" not in repr(target) + repr(process.argv) + repr(argv)


def test_a_key_that_a_server_wrote_back_does_not_stay_in_what_aiperf_wrote(tmp_path: Path, host_of: Start) -> None:
    trial = tmp_path / "trial-01"
    trial.mkdir()
    record = trial / "profile_export.jsonl"
    program = f"import pathlib; pathlib.Path({str(record)!r}).write_text('401 of sk-1, caf\\xe9'); print('wrote sk-1')"
    with Aiperf(host_of(program, "sk-1"), ("program",), trial / "aiperf.log") as process:
        assert _exit_code(process) == 0
    assert record.read_text() == "401 of [redacted], caf\xe9"
    assert (trial / "aiperf.log").read_text() == "wrote [redacted]\n"


def test_its_sockets_have_room_in_their_paths_however_long_the_temporary_directory_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_of: Start
) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    program = (
        "import pathlib, socket, tempfile; at = pathlib.Path(tempfile.mkdtemp()) / 'aiperf'; at.mkdir()\n"
        "socket.socket(socket.AF_UNIX).bind(str(at / 'dataset_manager_proxy_frontend.ipc')); print('bound')"
    )
    with Aiperf(host_of(program), ("program",), tmp_path / "aiperf.log") as process:
        assert _exit_code(process) == 0
    assert (tmp_path / "aiperf.log").read_text() == "bound\n"


def test_aiperf_is_imported_by_its_host_with_all_that_a_call_takes(tmp_path: Path) -> None:
    with AiperfHost(tmp_path / "host.log") as host, Aiperf(host, ("aiperf", "--version"), tmp_path / "log") as call:
        assert _exit_code(call) == 0, (tmp_path / "host.log").read_text()
    assert (tmp_path / "log").read_text().strip() == version("aiperf")


def _call(spec: LoadSpec, concurrency: int, trial: int = 1) -> tuple[str, ...]:
    (load,) = (load for load in spec.loads if load.concurrency == concurrency)
    return command(Target("http://127.0.0.1:9", "tiny", Path("tokenizer"), "agg"), spec, load, trial, Path("trial"))


def _value(argv: tuple[str, ...], option: str) -> str:
    return argv[argv.index(option) + 1]


def test_each_request_has_a_prompt_of_its_own_warm_up_included() -> None:
    spec = LoadSpec(concurrency=(8,), request_count=100, warmup_request_count=20)
    assert _value(_call(spec, 8), "--num-dataset-entries") == "120"


def test_a_trial_has_the_seed_that_aiperf_derives_for_it_in_a_sweep() -> None:
    from aiperf.common.random_generator import derive_variation_seed

    spec = LoadSpec(concurrency=(1, 8), seed=11, trials=2)
    for trial in (1, 2):
        derived = derive_variation_seed(11, f"c8:trial:{trial - 1}")
        assert _value(_call(spec, 8, trial), "--random-seed") == str(derived)


BOX = """22:04:02.127 INFO     Prefetching 1 tokenizer into HF cache...
Traceback (most recent call last):
╭──────────────── No Standard Tokenizer ─────────────────╮
│                                                        │
│  Failed to load tokenizer '/models/x'                  │
│                                                        │
│  AIPerf needs a tokenizer for client-side counting.    │
╰────────────────────────────────────────────────────────╯
"""
EXIT = """21:21:53.149 ERROR    All 16 inference request(s) failed (system_controller.py:2370)
╭─ AIPerf System Exit Errors ────────────────────────────╮
│ • Service: system_controller                           │
│    Error: Unknown                                      │
│    Reason: The dataset manager died.                   │
│            See the log.                                │
╰────────────────────────────────────────────────────────╯
Log File: /runs/x/aiperf.log
"""


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (BOX, "Failed to load tokenizer '/models/x'"),
        (EXIT, "The dataset manager died. See the log."),
        ("INFO a\nKilled\n", "Killed"),
        ("", "its log is empty"),
    ],
)
def test_what_aiperf_complains_of_is_one_line_without_boxes(tmp_path: Path, log: str, said: str) -> None:
    (tmp_path / "aiperf.log").write_text(log, encoding="utf-8")
    assert complaint(tmp_path / "aiperf.log") == said


def test_an_installation_without_the_endpoint_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_endpoint()  # the one that these tests run in has it
    monkeypatch.setattr("trtx.bench.aiperf.command.ENTRY_POINT", "missing")
    with pytest.raises(UsageError, match="does not provide aiperf with the endpoint 'trtx_chat'.*install trtx again"):
        run(ExperimentSpec(), parent=tmp_path / "runs", argv=["trtx", "bench"])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("name", "value"), [("AIPERF_HTTP_FORCE_CLOSE", "true"), ("AIPERF_HTTP_SO_RCVBUF", "many")])
def test_a_setting_of_aiperf_in_the_environment_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=rf"{name} is set, .*unset it"):
        run(ExperimentSpec(), parent=tmp_path / "runs", argv=["trtx", "bench"])
    with pytest.raises(UsageError, match=rf"{name} is set, .*unset it"):
        plan_only(ExperimentSpec(), parent=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_an_aiperf_that_waits_for_ever_is_ended_and_the_sentence_says_for_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_of: Start
) -> None:
    monkeypatch.setattr(sys.modules["trtx.bench.sweep"], "_BETWEEN_REQUESTS_S", 0.5)  # the function has its name
    host = host_of("import time; print(os.getpid(), flush=True); time.sleep(60)")
    target = Target("http://127.0.0.1:9", "tiny", Path("tokenizer"), "agg")
    with pytest.raises(
        LoadGeneratorError, match=r"reported no finished request of .* for 1 s.*request_timeout_s is 0\.25.*its log"
    ):
        sweep(host, target, LoadSpec(concurrency=(1,), request_timeout_s=0.25), tmp_path)
    (log,) = tmp_path.rglob("aiperf-console.log")
    if text := log.read_text():  # it may not have come to say so
        assert not psutil.pid_exists(int(text))
