"""The aiperf process's life, with small real processes in aiperf's place."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from trtx.bench import Load, LoadSpec, Target, sweep
from trtx.bench.aiperf import Aiperf, check_endpoint, command, complaint
from trtx.bench.endpoint import API_KEY_VARIABLE
from trtx.errors import LoadGeneratorError, UsageError
from trtx.experiment import ExperimentSpec, run

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
                          "print('child', flush=True); time.sleep(60)"])
print("ready", child.pid, flush=True)
time.sleep(60)
"""


def _until(path: Path, words: tuple[str, ...]) -> str:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        text = path.read_text()
        if all(word in text for word in words):
            return text
        time.sleep(0.02)
    raise AssertionError(f"{path} never said {words}: {path.read_text()!r}")


def test_leaving_the_context_ends_the_whole_session_even_if_it_ignores_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtx.bench.aiperf.GRACE_S", 0.3)
    log = tmp_path / "aiperf.log"
    with Aiperf([sys.executable, "-c", STUBBORN], log) as process:
        text = _until(log, ("ready", "child\n"))
        grandchild = int(text.split("ready ")[1].split()[0])
        assert process.poll() is None
    for pid in (process.pid, grandchild):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_its_temporary_files_go_with_it_and_its_log_stays(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "aiperf.log"
    with Aiperf([sys.executable, "-c", "import os; print(os.environ['TMPDIR'])"], log) as process:
        deadline = time.monotonic() + 20
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert process.poll() == 0
        scratch = Path(process.log_tail().strip())
        assert scratch.is_dir()
    assert not scratch.exists()
    assert process.log_tail() == str(scratch)


def test_aiperf_sees_no_offline_switch_and_no_remote_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    log = tmp_path / "aiperf.log"
    program = "import os; print(os.environ.get('HF_HUB_OFFLINE'), os.environ['HF_ENDPOINT'])"
    with Aiperf([sys.executable, "-c", program], log) as process:
        deadline = time.monotonic() + 20
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
    assert process.log_tail() == "None http://127.0.0.1:9"
    assert os.environ["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize("key", ["sk-1", None])
def test_aiperf_gets_the_key_of_this_server_alone_and_not_by_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "sk-of-another-run")
    program = f"import os; print('found', os.environ.get('{API_KEY_VARIABLE}'))"
    log = tmp_path / "aiperf.log"
    with Aiperf([sys.executable, "-c", program], log, api_key=key) as process:
        _until(log, (f"found {key}",))
    spec = LoadSpec(concurrency=(1, 2))
    target = Target("http://127.0.0.1:9", "tiny", Path("tokenizer"), "attached", api_key="sk-1")
    assert "sk-1" not in repr(target) + repr(process.argv) + repr(command(target, spec, spec.loads, tmp_path))


def test_a_key_that_a_server_wrote_back_does_not_stay_in_what_aiperf_wrote(tmp_path: Path) -> None:
    record = tmp_path / "staging" / "c1" / "profile_export.jsonl"
    record.parent.mkdir(parents=True)
    program = f"import pathlib; pathlib.Path({str(record)!r}).write_text('401 of sk-1, caf\\xe9'); print('wrote sk-1')"
    with Aiperf([sys.executable, "-c", program], tmp_path / "staging" / "aiperf.log", api_key="sk-1") as process:
        _until(process.log_path, ("wrote",))
    assert record.read_text() == "401 of [redacted], caf\xe9"
    assert process.log_tail() == "wrote [redacted]"


def test_its_sockets_have_room_in_their_paths_however_long_the_temporary_directory_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    program = (
        "import os, pathlib, socket, tempfile; at = pathlib.Path(tempfile.mkdtemp()) / 'aiperf'; at.mkdir()\n"
        "socket.socket(socket.AF_UNIX).bind(str(at / 'dataset_manager_proxy_frontend.ipc')); print('bound')"
    )
    with Aiperf([sys.executable, "-c", program], tmp_path / "aiperf.log") as process:
        _until(tmp_path / "aiperf.log", ("bound",))
    assert process.log_tail() == "bound"


def _call(spec: LoadSpec, *concurrency: int) -> tuple[str, ...]:
    loads = [Load(c, spec.request_count_at(c), spec.warmup_request_count_at(c)) for c in concurrency]
    return command(Target("http://127.0.0.1:9", "tiny", Path("tokenizer"), "agg"), spec, loads, Path("staging"))


def _value(argv: tuple[str, ...], option: str) -> str:
    return argv[argv.index(option) + 1]


def test_a_part_of_a_sweep_has_as_many_prompts_to_draw_from_as_the_whole() -> None:
    spec = LoadSpec(concurrency=(1, 8, 64))
    assert _value(_call(spec, 1, 8), "--num-dataset-entries") == _value(_call(spec, 1, 8, 64), "--num-dataset-entries")


def test_a_load_alone_gets_the_seed_that_aiperf_derives_for_it_in_a_sweep() -> None:
    from aiperf.common.random_generator import derive_variation_seed

    spec = LoadSpec(concurrency=(1, 8), seed=11)
    alone, both = _call(spec, 8), _call(spec, 1, 8)
    assert _value(alone, "--random-seed") == str(derive_variation_seed(11, "c8:trial:0"))
    assert "--vary-seed-per-trial" not in alone
    assert _value(both, "--random-seed") == "11" and "--vary-seed-per-trial" in both


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
    monkeypatch.setattr("trtx.bench.aiperf.ENTRY_POINT", "missing")
    with pytest.raises(UsageError, match="does not offer aiperf its endpoint 'trtx_chat'.*install trtx again"):
        run(ExperimentSpec(), parent=tmp_path / "runs", argv=["trtx", "bench"])
    assert not (tmp_path / "runs").exists()


def test_an_aiperf_that_waits_for_ever_is_ended_and_the_sentence_says_for_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["trtx.bench.sweep"]  # the function has its name
    monkeypatch.setattr(module, "_BETWEEN_REQUESTS_S", 0.5)
    monkeypatch.setattr(module, "command", lambda *arguments: (sys.executable, "-c", "import time; time.sleep(60)"))
    started: list[int] = []
    with pytest.raises(LoadGeneratorError, match=r"told of no request for 1 s.*0\.25 s \(request_timeout_s\).*its log"):
        sweep(
            Target("http://127.0.0.1:9", "tiny", Path("tokenizer"), "agg"),
            LoadSpec(concurrency=(1,), request_timeout_s=0.25),
            tmp_path,
            on_start=lambda pid, scratch: started.append(pid),
        )
    assert len(started) == 1 and not psutil.pid_exists(started[0])
