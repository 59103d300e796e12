"""``trtx bench`` as a person types it, up to the point where something would start."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer
from other_values import another

from trtx.cli import bench
from trtx.cli.app import run
from trtx.cli.run_options import show_run
from trtx.config import TopologySpec
from trtx.errors import GateError, UsageError
from trtx.experiment import FinishedRun
from trtx.experiment.bench import axes

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "report" / "golden" / "run"
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
        (["--input-file", "none.jsonl"], ["none.jsonl", "can't be read"]),
        (["--public-dataset", "nope"], ["dataset nope", "sharegpt"]),
        (["--extra-inputs", "temperature"], ["'temperature'", "KEY:VALUE"]),
        (["--extra-inputs", "{temperature: 1"], ["not JSON"]),
        (["--extra-inputs", "stream:false"], ["extra_inputs.stream", "load.streaming"]),
        (["--temperature", "1", "--extra-inputs", "temperature:0"], ["temperature a second value"]),
        (["--temperature", "nan"], ["extra_inputs.temperature", "JSON"]),
        (["--engine", "paced", "--temperature", "5"], ["temperature is 5.0", "a number from 0 to 2"]),
        (["--engine", "paced", "--top-p", "2", "--dry-run"], ["top_p is 2.0", "a number above 0 up to 1"]),
        (["--engine", "paced", "--top-k", "-5"], ["top_k is -5", "a whole number from -1 on"]),
        (["--engine", "paced", "--extra-inputs", "min_p:2"], ["min_p is 2", "a number from 0 to 1"]),
        (["--engine", "paced", "--isl", "64,1"], ["isl 1 is shorter", "adds 12 tokens", "ask for 13 or more"]),
        (
            ["--engine", "paced", "--isl", "20", "--prefix-prompt-length", "10", "--dry-run"],
            ["isl 20 is shorter", "and 10 are shared", "ask for 23 or more"],
        ),
        (["--aiperf-args", "--concurrency 3"], ["sets concurrency", "load.concurrency"]),
        (["--aiperf-args", "--nope"], ["Unknown option: --nope"]),
        (["--aiperf-args", "'"], ["--aiperf-args", "close the quotes"]),
        (
            ["--engine", "paced", "--model", "synthetic:tiny", "--session-turns-mean", "99"],
            ["99 turns", "63360", "8192"],
        ),
        (["sweeps/demo.yaml", "--sweep", "sweeps/demo.yaml"], ["--sweep", "SWEEP", "leave one of them out"]),
        (["none.yaml"], ["none.yaml", "can't be read"]),
        (["--slo", "ttft:p99:le:5"], ["--slo ttft:p99:le:5", "did you mean time_to_first_token"]),
        (["--min-goodput", "5"], ["--min-goodput", "--slo"]),
        (["--min-goodput", "nan", "--slo", "request_latency:p50:le:9"], ["gate.min_goodput"]),
        (["--baseline", "main"], ["--baseline", "--max-regression"]),
        (["--max-error-rate", "0.05"], ["--max-error-rate 0.05", "5%"]),
        (["--save-baseline", "a/b"], ["'a/b' can't be the name of a baseline"]),
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


# Words of an option beside an axis of its name, where other_values.py derives none from the field.
TYPED = {
    "media": ["--max-images", "3"],
    "gpus": ["--gpus", "0"],
    "router_args": ["--router-args", "'--router-temperature 0.5'"],
    "recipe": ["--recipe", "qwen3"],
    "overrides.max_batch_size": ["--set", "max_batch_size=8"],
    "overrides.kv_cache_config": ["--set", "agg.kv_cache_config.max_tokens=8"],
}


def typed(axis: str) -> list[str]:
    if axis in TYPED:
        return TYPED[axis]
    value = another(axis, TopologySpec.model_fields[axis])
    assert value is not None, (
        f"topology.{axis} can be an axis, and its type tells no second value: add one to TEXTS of "
        "tests/unit/other_values.py"
    )
    option = f"--{axis.replace('_', '-')}"
    return [option] if value is True else [option, str(value)]


@pytest.mark.parametrize("axis", sorted({*axes.AXIS_FIELDS, *TYPED}))
def test_an_option_beside_an_axis_of_the_same_name_is_refused_and_both_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, axis: str
) -> None:
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(f"axes: {{{axis}: [1, 2]}}\n")
    mode = "disagg" if axis in ("prefill", "decode", "conditional_disagg") else "agg"
    assert run(["bench", str(sweep), "--mode", mode, *typed(axis), "--dry-run"]) == 2
    said = capsys.readouterr().err.strip()
    assert typed(axis)[0] in said and f"has no effect with axes.{axis}, " in said and "\n" not in said


def test_an_axis_beside_a_field_wins_or_is_refused_by_who_said_both(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sweep = tmp_path / "sweep.yaml"
    argv = ["bench", str(sweep), "--engine", "paced", "--model", "synthetic:tiny", "--dry-run"]
    sweep.write_text("topology: {workers: 3}\n")
    assert run([*argv, "--axis", "workers=1,2"]) == 0  # flags win
    assert "agg-2w" in capsys.readouterr().out
    assert run([*argv, "--axis", "workers=1,2", "--workers", "2"]) == 2
    assert "--workers has no effect with --axis workers" in capsys.readouterr().err
    sweep.write_text("topology: {workers: 3}\naxes: {workers: [1, 2]}\n")
    assert run(argv) == 2
    assert "topology.workers has no effect with axes.workers" in capsys.readouterr().err
    sweep.write_text("modes: [disagg]\naxes: {overrides.prefill.max_batch_size: [4, 8]}\n")
    assert run([*argv, "--set", "max_batch_size=16"]) == 0  # decode workers have it


def test_a_dry_run_says_what_each_cell_will_be_judged_by(capsys: pytest.CaptureFixture[str]) -> None:
    gate = ["--slo", "time_to_first_token:p99:le:500", "--min-goodput", "2"]
    assert run(["bench", "--engine", "paced", "--model", "synthetic:tiny", *gate, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-4:] == [
        "Criteria for each cell:",
        "  failed requests: at most 0%",
        "  time_to_first_token:p99: at most 500 ms",
        "  goodput: at least 2 requests/s",
    ]


def test_a_sweep_file_needs_no_option_and_its_gate_is_the_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("topology: {engine: paced, model: 'synthetic:tiny'}\nload: {concurrency: [3]}\n"
                     "gate: {slo: ['request_latency:p50:le:9'], max_error_rate: 1%}\n")  # fmt: skip
    assert run(["bench", str(sweep), "--max-error-rate", "2%", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "concurrency 3:" in shown and "request_latency:p50: at most 9 ms" in shown
    assert "failed requests: at most 2%" in shown  # flags win


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
    *notes, said = capsys.readouterr().err.strip().splitlines()
    assert said.startswith("trtx: ") and str(tmp_path / "taken") in said and "-o" in said
    assert all("does not act on" in note for note in notes)


@pytest.mark.parametrize(("error", "code"), [(GateError("agg-c1 missed"), 1), (None, 2)])
def test_a_baseline_that_can_not_be_saved_hides_nothing_of_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, error: GateError | None, code: int
) -> None:
    kept = Path(shutil.copytree(GOLDEN, tmp_path / "run"))
    unsaved = UsageError("main.json can't be written")
    with pytest.raises(typer.Exit) as ended:
        show_run(
            "trtx bench",
            lambda argv, listener: FinishedRun(kept, kept / "report.html", error, unsaved=unsaved),
            bench.result,
            as_json=False,
        )
    shown = capsys.readouterr()
    assert ended.value.exit_code == code and "agg-c1" in shown.out + shown.err
    assert "trtx: main.json can't be written" in shown.err
    assert error is None or "trtx: agg-c1 missed" in shown.err


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


def test_what_is_typed_of_every_request_reaches_its_body_as_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    typed = ["--temperature", "0.5", "--top-k", "4", "--extra-inputs", "seed:3,user:me", "--extra-inputs", '{"a": [1]}']
    argv = ["bench", "--engine", "paced", "--concurrency", "1", *typed, "-o", str(tmp_path), "--dry-run"]
    assert run(argv) == 0
    call = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  $ aiperf"))
    words = shlex.split(call)
    body = json.loads(words[words.index("--extra-inputs") + 1])
    assert body.items() >= {"temperature": 0.5, "top_k": 4, "seed": 3, "user": "me", "a": [1]}.items()


def test_a_dry_run_says_how_long_it_takes_only_where_an_earlier_run_tells(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    argv = [
        "bench",
        "--engine",
        "paced",
        "--model",
        "synthetic:tiny-trained",
        "--isl",
        "64",
        "--osl",
        "16",
        "--dry-run",
    ]
    assert run([*argv, "--concurrency", "1,64", "-o", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out
    assert "Cells: agg-c1, agg-c64\n" in shown
    assert f"Time: not known: no earlier run in {tmp_path}/runs/\n" in shown
    shutil.copytree(GOLDEN, tmp_path / "runs" / "earlier")
    assert run([*argv, "--concurrency", "1,64", "-o", str(tmp_path / "runs")]) == 0
    assert re.search(r"Time: about \d+ .* for 1 of 2 cells, .*; not known for agg-c64\n", capsys.readouterr().out)
