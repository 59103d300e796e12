"""``trtx bench`` as a person types it, up to the point where something would start."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from trtx.cli import bench
from trtx.cli.app import run

EXAMPLES = [line.strip() for line in (bench.bench.__doc__ or "").splitlines() if line.strip().startswith("trtx bench")]


def test_a_dry_run_shows_both_topologies_and_their_loads_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    argv = ["bench", "--engine", "paced", "--mode", "agg,disagg", "--concurrency", "1,8", "--isl", "100", "--osl", "50"]
    assert run([*argv, "-o", str(tmp_path / "runs"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "Load on agg:",
        "Load on disagg:",
        "--role prefill",
        "concurrency 8: 88 requests after 33",
        "aiperf profile",
    ):
        assert words in shown
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mode", "split"], ["'split'", "agg", "disagg"]),
        (["--concurrency", "1,x"], ["--concurrency", "'1,x'"]),
        (["--concurrency", "0"], ["load.concurrency", "0"]),
        (["--trials", "101"], ["load.trials", "101"]),
        (["--mode", "agg", "--prefill", "2"], ["--prefill", "--mode disagg"]),
        (["--mode", "agg,disagg", "--port", "8123"], ["port 8123"]),
        (["--url", "http://127.0.0.1:9", "--engine", "torch"], ["--engine", "--url"]),
        (["--tokenizer", "here"], ["--tokenizer", "--url"]),
        (["--url", "http://127.0.0.1:9"], ["http://127.0.0.1:9/v1/models", "check --url"]),
        (["--engine", "paced", "--isl", "4000", "--osl", "200", "--set", "max_seq_len=4096"], ["4200", "4096"]),
        (["--sweep", "none.yaml"], ["none.yaml", "can't be read"]),
        (["--url", "127.0.0.1:8000"], ["'127.0.0.1:8000'", "http://"]),
        (["--engine", "paced", "--model", "synthetic:tiny", "--isl", "9000"], ["9128", "context", "8192"]),
        (["--engine", "paced", "--model", "synthetic:tiny", "--osl", "9000", "--dry-run"], ["9512", "context", "8192"]),
        (["--config", "decode=decode.yaml"], ["--config 'decode=decode.yaml'", "--mode agg"]),
        (["--resume", "runs/none"], ["--output", "--resume", "leave it out"]),
        (["--mode", "disagg", "--set", "agg.max_batch_size=4"], ["--set 'agg.max_batch_size=4'", "decode and prefill"]),
    ],
)
def test_a_usage_mistake_exits_2_with_one_sentence_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    assert run(["bench", *arguments, "-o", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("trtx: ") and "\n" not in said
    for word in words:
        assert word in said
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_of_the_help_runs_as_pasted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, example: str
) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    arguments = shlex.split(example)[1:]
    assert run([*arguments, *([] if "--dry-run" in arguments else ["--dry-run"])]) == 0
    assert "Load on " in capsys.readouterr().out


def test_the_help_has_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("verb", [["bench", "--concurrency", "1"], ["serve", "--port", "0"]])
def test_an_output_that_is_a_file_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: list[str]
) -> None:
    (tmp_path / "taken").write_text("")
    assert run([*verb, "--engine", "paced", "--model", "synthetic:tiny", "-o", str(tmp_path / "taken")]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("trtx: ") and "\n" not in said
    assert str(tmp_path / "taken") in said and "-o" in said


def test_a_sweep_file_that_is_no_text_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_bytes(b"\xff\xfe\x00")
    assert run(["bench", "--sweep", str(tmp_path / "sweep.yaml")]) == 2
    assert "line 1 is not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [([], "run.lock.yaml"), (["--set", "a=1"], "--set"), (["--isl", "9"], "--isl"), (["--dry-run"], "--dry-run")],
)
def test_resuming_takes_a_run_directory_and_nothing_beside_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], word: str
) -> None:
    assert run(["bench", "--resume", str(tmp_path), *arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("trtx: ") and "\n" not in said
    assert word in said
    assert list(tmp_path.iterdir()) == []
