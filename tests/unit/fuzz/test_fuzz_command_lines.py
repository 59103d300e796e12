"""Odd command lines: whatever is typed is honoured or refused with one sentence, and nothing hangs."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzzing import LONG, ODD_TEXTS, ask, cases, judge, needed, options_of, takes_no_value, verb_of

from trtx.cli.app import VERBS

pytestmark = pytest.mark.slow

# What keeps each verb from starting or building anything, whatever stands beside it. Of a build: a config of a role
# whose file is not there is looked for after the model was read. Of eval: a baseline that is none.
# Of eval fidelity: a reference that is no checkpoint. Of eval parity: a model that is none. Of serve join: an etcd that
# is none.
SAFE = {
    "serve": ["serve", "--dry-run"],
    "serve join": ["serve", "join", "--etcd", "http://127.0.0.1:9", "--name", "none"],
    "bench": ["bench", "--dry-run"],
    "build": ["build", "--check"],
    "build --quant": ["build", "--config", "agg=no/such.yaml", "--quant", "fp8"],
    "bench ab": ["bench", "ab", "no-such.yaml", "no-other.yaml", "--dry-run"],
    "bench reproduce": ["bench", "reproduce", "no-such.lock.yaml", "--dry-run"],
    "eval": ["eval", "--tasks", "trtx", "--baseline", "directory"],
    "eval fidelity": ["eval", "fidelity", "--reference", "directory"],
    "eval parity": ["eval", "parity", "--model", "directory"],
    "explain": ["explain", "directory"],
    "sleep": ["sleep", "directory"],
    "wake": ["wake", "directory"],
    "update": ["update", "directory", "synthetic:tiny"],
    "export nginx": ["export", "nginx"],
    "export prometheus": ["export", "prometheus", "directory"],
    "export grafana": ["export", "grafana", "directory"],
    "compare": ["compare", "file", "directory"],
    "baseline": ["baseline", "list"],
    "report": ["report", "directory"],
    "export kubernetes": ["export", "kubernetes", "--image", "reg/trtx:1.4.2", "--engine", "paced"],
    "export slurm": ["export", "slurm", "--engine", "paced"],
    "doctor": ["doctor"],
}
_FLAGS = {option for verb in VERBS for option in options_of(verb) if takes_no_value(option, verb)} | {"--help"}
_REPEATED = {"--set", "--config", "--role", "--axis", "--slo", "--allow-different", "--extra-inputs", "--min-score"}
_REPEATED |= {"--resource", "--node-selector", "--sbatch", "--etcd", "--worker"}
_USUAL = {
    "--engine": ["paced", "torch", "simulated", "auto"],
    "--mode": ["agg", "disagg", "agg,disagg"],
    "--model": ["synthetic:tiny", "synthetic:qwen3-8b"],
    "--config": ["agg=file", "decode=empty", "agg=fifo", "encode=file"],
    "--recipe": ["qwen3", "tiny", "deepseek-r1-mtp"],
    "--set": ["max_batch_size=8", "prefill.max_num_tokens=64", "kv_cache_config=3", "a.b=[1", "agg=1", "decode.x="],
    "--gpu": ["H100", "H200", "T4"],
    "--role": ["agg", "encode"],
    "--concurrency": ["1", "1,8", "8,8"],
    "--url": ["http://127.0.0.1:9", "https://127.0.0.1:1/v1"],
    "--backend": ["pytorch", "tensorrt"],
    "--quant": ["none", "fp8"],
    "--slo": ["time_to_first_token:p99:le:500", "request_latency:avg:ge:1"],
    "--metrics": ["request_latency:p50", "output_token_throughput"],
    "--baseline": ["file", "directory", "main"],
    "--max-regression": ["5%", "0%"],
    "--min-score": ["trtx_json:exact_match:0.5", "trtx:acc"],
    "--endpoint-type": ["chat", "completions"],
    "--extra-inputs": ["seed:1", '{"a": 1}', "stream:no"],
    "--aiperf-args": ["--slice-duration 1", "--concurrency 4"],
    "--input-file": ["file", "directory", "fifo"],
    "--public-dataset": ["sharegpt"],
    "--custom-dataset-type": ["single_turn", "mooncake_trace"],
}


@pytest.mark.hypothesis  # make proof has all cases, as of a property test
def test_odd_values_of_every_option_are_refused_with_a_sentence_or_honoured(odd_directory: Path) -> None:
    pairs = []
    for name, safe in SAFE.items():
        verb = verb_of(name.split()) or name
        own = sorted(option for option in options_of(verb) - _FLAGS - set(safe) if option.startswith("--"))
        pairs += [[*safe, option, text] for option, text in itertools.product(own, ODD_TEXTS)]
        pairs += [
            [*safe, f"{option}={prefix}{text}"] for option, prefix in _PREFIXED for text in ODD_TEXTS if option in own
        ]
    for draw in cases(220, "value"):
        argv = draw.choice(pairs)
        judge(argv, ask(argv))


_PREFIXED = (
    ("--config", "agg="),
    ("--set", "max_batch_size="),
    ("--set", "kv_cache_config."),
    ("--router-args", "--x "),
)


@pytest.mark.hypothesis  # make proof has all cases, as of a property test
def test_odd_combinations_of_options_are_refused_with_a_sentence_or_honoured(odd_directory: Path) -> None:
    for draw in cases(130, "combination"):
        name = draw.choice(sorted(SAFE))
        argv = [*SAFE[name]]
        own = sorted(options_of(verb_of(name.split()) or name) - {"--help"})
        for option in draw.sample(own, min(len(own), draw.randint(1, 4))):
            if not option.startswith("--"):
                argv.append(draw.choice(["synthetic:tiny", *ODD_TEXTS]))
            elif option in _FLAGS:
                argv.append(option)
            else:
                argv += [option, draw.choice(_USUAL.get(option, ["1", "2", "x"]))]
        judge(argv, ask(argv))


@pytest.mark.parametrize(
    "argv", [["serve", "--", LONG], ["no-such-verb"], [LONG], [""], ["serve", "x"], ["\0"], ["bench", "--x"]]
)
def test_what_is_no_command_line_is_one_sentence(argv: list[str]) -> None:
    answer = ask(argv)
    assert answer.code == 2
    judge(argv, answer)


@pytest.mark.parametrize("verb", sorted(VERBS))
@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.proof) for turn in (1, 2))])
def test_an_empty_value_of_any_option_is_refused(verb: str, turn: int, odd_directory: Path) -> None:
    """In one of three spellings, in turn from option to option."""
    for number, option in enumerate(sorted(options_of(verb) - _FLAGS)):
        if option.startswith("--"):
            argv = [*SAFE[verb], *([option, ""], [f"{option}="], [option, "  "])[(number + turn) % 3]]
            answer = ask(argv)
            assert answer.code == 2 and option in answer.err, argv
            judge(argv, answer)


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_an_option_that_takes_one_value_is_refused_twice(verb: str) -> None:
    for option in sorted(options_of(verb) - _FLAGS - _REPEATED):
        if option.startswith("--"):
            answer = ask([*verb.split(), *needed(verb), option, "1", option, "1"])
            assert answer.code == 2 and f"{option} is given twice" in answer.err


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ([b"serve", b"--dry-run", b"--config", b"agg=fifo"], "a pipe"),
        pytest.param([b"bench", b"--sweep", b"zero"], "a device", marks=pytest.mark.proof),
        ([b"serve", b"--dry-run", b"--model", b"\xff\xfe"], "UTF-8"),
        pytest.param(
            [b"build", b"synthetic:tiny", b"--quant", b"fp8", b"--calib", b"fifo"], "a pipe", marks=pytest.mark.proof
        ),
    ],
)
def test_a_process_of_its_own_ends_with_one_sentence(odd_directory: Path, argv: list[bytes], word: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trtx", *argv], capture_output=True, text=True, timeout=60, env={**os.environ}
    )
    assert done.returncode == 2
    assert done.stderr.startswith("trtx: ") and done.stderr.count("\n") == 1
    assert word in done.stderr
