"""``trtx build`` killed, stopped or out of disk while it exports, and TensorRT's own route: real processes.

ModelOpt and TensorRT-LLM 1.2 are the few names of them under ``fakes/``; everything else is real.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
from called import Done, call
from processes import TRTX

from trtx.build.child import run_child
from trtx.checkpoint import resolve_checkpoint

FAKES = Path(__file__).parent / "fakes"
MODEL = "synthetic:tiny-trained"
Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def trtx_build(tmp_path: Path) -> Iterator[Run]:
    started: list[subprocess.Popen[str]] = []

    def run(
        fake: str, *arguments: str, export: str = "", calibration_size: int = 2, model: str = MODEL
    ) -> subprocess.Popen[str]:
        environment = os.environ | {
            "PYTHONPATH": str(FAKES / fake),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "FAKE_EXPORT": export,
        }
        command = [*TRTX, "build", model, *arguments]
        command += ["-o", str(tmp_path / "builds"), "--calib-size", str(calibration_size)]
        started.append(
            subprocess.Popen(
                command,
                env=environment,
                cwd=Path(__file__).parents[3],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def build_without_quantizing(builds: Path, model: Path, *arguments: str) -> Done:
    """``trtx build --quant none``, which no test here interrupts."""
    variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return call("build", str(model), "--quant", "none", *arguments, "-o", str(builds), variables=variables)


def until(process: subprocess.Popen[str], said: str) -> psutil.Process:
    """Waits until it says so and has its child, which it starts in the same breath."""
    assert process.stdout is not None
    if not any(line.strip() == said for line in process.stdout):
        raise AssertionError(f"it ended before it said {said}")
    deadline = time.monotonic() + 10
    while not (children := psutil.Process(process.pid).children()):
        assert time.monotonic() < deadline
    return children[0]


def left(builds: Path) -> list[str]:
    return sorted(path.name for path in builds.iterdir())


def test_killed_while_it_exports_it_leaves_no_build_and_the_next_one_clears_up(trtx_build: Run, tmp_path: Path) -> None:
    builds = tmp_path / "builds"
    killed = trtx_build("modelopt", "--quant", "fp8", export="hang")
    child = until(killed, "exporting")
    deadline = time.monotonic() + 60
    while [path.read_bytes() for path in builds.glob(".*.partial/model.safetensors")] != [b"half"]:
        assert time.monotonic() < deadline, "it has exported nothing"
        time.sleep(0.02)
    killed.kill()
    killed.wait(10)
    child.wait(10)
    (partial,) = builds.glob(".*.partial")
    assert [path for path in builds.iterdir() if path.is_dir()] == [partial]
    another = trtx_build("modelopt", "--quant", "fp8", export="hang", calibration_size=1)
    until(another, "starting ModelOpt")
    assert not partial.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_it_leaves_nothing(trtx_build: Run, tmp_path: Path, number: signal.Signals) -> None:
    stopped = trtx_build("modelopt", "--quant", "fp8", export="hang")
    child = until(stopped, "starting ModelOpt")
    stopped.send_signal(number)
    assert stopped.wait(20) == 128 + number
    assert not child.is_running()
    assert left(tmp_path / "builds") == []


@dataclass
class Job:
    """One that no child gets: it is gone before."""


class Stopped(Exception):
    """What a handler raises."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped_before_anybody_holds_the_child_it_leaves_none(tmp_path: Path, number: signal.Signals) -> None:
    def stop(_: int, frame: FrameType | None) -> None:
        raise Stopped

    def stop_after_fork(_: FrameType, event: str, called: Any) -> None:
        if event == "c_return" and called.__name__ == "fork_exec":  # in Popen, which has not returned
            sys.setprofile(None)
            children.update(psutil.Process().children())
            os.kill(os.getpid(), number)

    children: set[psutil.Process] = set()
    before, others = signal.signal(number, stop), set(psutil.Process().children())
    lock_fd = os.open(tmp_path, os.O_RDONLY)
    sys.setprofile(stop_after_fork)
    try:
        with pytest.raises(Stopped):
            run_child("quantize", Job(), log=tmp_path / "log", lock_fd=lock_fd, on_progress=lambda _: None)
        assert signal.getsignal(number) is stop
    finally:
        sys.setprofile(None)
        signal.signal(number, before)
        os.close(lock_fd)
    (child,) = children - others
    assert not child.is_running(), "a child that nobody holds runs on: its handle is known before a signal is handled"


def test_a_disk_that_fills_up_while_it_exports_is_named_and_nothing_is_left(trtx_build: Run, tmp_path: Path) -> None:
    full = trtx_build("modelopt", "--quant", "fp8", export="full")
    said = full.communicate(timeout=60)[0].splitlines()
    assert full.returncode == 2
    assert "is full: the build needs about" in said[-1]
    assert "bytes" in said[-1]
    assert left(tmp_path / "builds") == []


def test_a_quantizer_that_crashes_is_one_sentence_with_its_log(trtx_build: Run, tmp_path: Path) -> None:
    crashed = trtx_build("modelopt", "--quant", "fp8", export="crash")
    said = crashed.communicate(timeout=60)[0].splitlines()
    assert crashed.returncode == 4
    assert "the process that quantizes the model ended with signal 11" in said[-1]
    (log,) = left(tmp_path / "builds")
    assert str(tmp_path / "builds" / log) in said[-1]


def test_tensorrt_builds_an_engine_with_the_configs_sizes_and_the_calibration_text(
    trtx_build: Run, tmp_path: Path
) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "once upon a time"}\n{"messages": [{"role": "user", "content": "Hi"}]}\n')
    options = ("--backend", "tensorrt", "--quant", "fp8", "--kv-dtype", "fp8", "--calib", str(text))
    built = trtx_build("trtllm", *options, "--set", "max_batch_size=7", "--set", "max_seq_len=512")
    said = built.communicate(timeout=60)[0]
    assert built.returncode == 0, said
    (directory,) = (tmp_path / "builds").iterdir()
    asked = json.loads((directory / "config.json").read_text())
    assert asked["build_config"] == {"max_batch_size": 7, "max_num_tokens": 2048, "max_seq_len": 512}
    assert asked["quant_config"] == {"quant_algo": "fp8", "kv_cache_quant_algo": "fp8"}
    assert asked["calib_config"]["calib_batches"] == 2
    assert asked["texts"][0] == "once upon a time"
    assert "Hi" in asked["texts"][1]
    assert asked["texts"][1] != "Hi"  # through the model's chat template
    assert (directory / "rank0.engine").read_bytes() == b"engine"
    assert (directory / "tokenizer.json").is_file()
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["proof"] is None
    assert manifest["inputs"]["backend"] == "tensorrt"
    assert "--backend tensorrt" in said


def test_a_model_that_the_embedded_engine_does_not_know_is_configured_and_not_proved(
    trtx_build: Run, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(resolve_checkpoint(MODEL).path, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text()) | {"architectures": ["MysteryForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config))
    taken = build_without_quantizing(tmp_path / "builds", model, "--max-ppl-increase", "1")
    assert taken.code == 3
    assert "not proved" in taken.out + taken.err
    assert "MysteryForCausalLM" in taken.out + taken.err
    (build,) = (tmp_path / "builds").iterdir()
    assert (build / "model.safetensors").samefile(model / "model.safetensors")
    assert (build / "engine_configs" / "decode.yaml").is_file()
    refused = trtx_build("modelopt", "--quant", "fp8", model=str(model))
    assert "MysteryForCausalLM is not known" in refused.communicate(timeout=60)[0].splitlines()[-1]
    assert refused.returncode == 2
    assert left(tmp_path / "builds") == [build.name]


def _truncated(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def _changed(**values: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_truncated, "model.safetensors cannot be read as safetensors"),
        (_changed(rope_theta="abc"), "rope_theta is 'abc'; expected a finite number above 0"),
        (_changed(vocab_size=4160), "model.embed_tokens.weight has shape"),
    ],
    ids=["truncated", "theta", "vocab"],
)
def test_a_checkpoint_that_contradicts_itself_is_no_build(
    tmp_path: Path, damage: Callable[[Path], None], told: str
) -> None:
    model = Path(shutil.copytree(resolve_checkpoint(MODEL).path, tmp_path / "model"))
    damage(model)
    refused = build_without_quantizing(tmp_path / "builds", model)
    assert told in refused.err.splitlines()[-1]
    assert refused.code == 2
    assert left(tmp_path / "builds") == []


def test_a_context_too_short_for_the_proof_is_built_and_not_proved(tmp_path: Path) -> None:
    model = Path(shutil.copytree(resolve_checkpoint(MODEL).path, tmp_path / "model"))
    _changed(max_position_embeddings=64)(model)
    built = build_without_quantizing(tmp_path / "builds", model)
    assert built.code == 0, built.err
    said = built.out + built.err
    assert "not proved" in said and "its context of 64 tokens is shorter than the" in said
