"""``trtx serve`` as typed: what is refused, what a dry run says, and how it reads."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trtx.checkpoint import resolve_checkpoint
from trtx.cli import app
from trtx.cli.topology_options import build_spec
from trtx.errors import UsageError


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")


def serve(*arguments: str) -> int:
    return app.run(["serve", "--port", "0", *arguments])


_DETERMINISTIC = ("--engine", "torch", "--deterministic")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--mode", "agg", "--prefill", "2"), ("--prefill", "--mode disagg", "--workers")),
        (("--mode", "disagg", "--workers", "2"), ("--workers", "--mode agg")),
        (("--gpus", "0,x"), ("--gpus '0,x'", "0,1")),
        (("--gpus", "0", "--engine", "torch"), ("--gpus 0", "no GPU is visible")),
        (("--config", "frontend=a.yaml"), ("--config 'frontend=a.yaml'", "agg, prefill, decode")),
        (("--config", "agg=/no/such.yaml"), ("/no/such.yaml",)),
        (("--config", "decode=decode.yaml"), ("--config 'decode=decode.yaml'", "decode workers", "--mode agg")),
        (("--set", "prefill.max_batch_size=4"), ("--set 'prefill.max_batch_size=4'", "agg workers alone")),
        (("--set", "kv_cache_config.max_tokns=1"), ("max_tokns", "max_tokens")),
        (("--set", "nonsense"), ("nonsense", "a.b=value")),
        (("--engine", "turbo"), ("turbo", "torch")),
        (("--engine", "tensorrt-llm"), ("tensorrt-llm",)),
        (
            ("--tp", "2", "--engine", "torch", "--set", "moe_expert_parallel_size=2"),
            ("moe_expert_parallel_size is 2", "has no experts", "leave it out"),
        ),
        (
            ("--tp", "2", "--engine", "torch", "--set", "moe_tensor_parallel_size=2"),
            ("moe_tensor_parallel_size is 2", "has no experts", "leave it out"),
        ),
        (
            ("--engine", "torch", "--set", "moe_expert_parallel_size=1"),
            ("moe_expert_parallel_size is 1", "has no experts", "leave it out"),
        ),
        (
            ("--model", "synthetic:tiny-moe", "--tp", "2", "--engine", "torch", "--set", "moe_expert_parallel_size=4"),
            ("moe_expert_parallel_size is 4", "divides tensor_parallel_size, 2"),
        ),
        (
            (*_DETERMINISTIC, "--mode", "disagg", "--set", "prefill.tensor_parallel_size=2"),
            ("--deterministic", "prefill workers have tensor_parallel_size 2 and decode workers 1", "the same sizes"),
        ),
        (("--tp", "16", "--engine", "torch"), ("tensor_parallel_size is 16; expected from 1 to 8", "(agg, --tp)")),
        (("--workers", "0"), ("--workers 0", "greater than or equal to 1")),
        (("--model", "/no/such/model"), ("/no/such/model",)),
    ],
)
def test_bad_input_is_refused_with_exit_2_and_starts_nothing(
    arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve("-o", str(tmp_path), *arguments) == 2
    said = capsys.readouterr().err
    for word in words:
        assert word in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_what_would_start_and_why_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--engine", "paced", "--mode", "disagg", "--decode", "2", "--set", "decode.paced_itl_ms=7")
    assert serve("-o", str(tmp_path), "--dry-run", *options) == 0
    said = capsys.readouterr().out
    for words in (
        "Dry run: nothing was started.",
        "-m trtx.frontend",
        "-m trtx.worker --role prefill",
        "--name decode-1",
        "DYN_TCP_RPC_HOST=127.0.0.1",
        "paced_itl_ms: 7",
        "decode: paced_itl_ms = 7 from --set",
        "no GPU because engine paced computes nothing",
    ):
        assert words in said
    assert list(tmp_path.iterdir()) == []


MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8}
DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the trained model that a test may spoil."""
    return Path(shutil.copytree(resolve_checkpoint("synthetic:tiny-trained").path, tmp_path / "model"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        ("config.json", MIXTRAL, "architecture MixtralForCausalLM is not known to the torch engine"),
        ("config.json", DYNAMIC, "rope_scaling.rope_type is 'dynamic'"),
        ("config.json", {"num_attention_heads": "four"}, "num_attention_heads is 'four'"),
        ("generation_config.json", {"eos_token_id": "two"}, "eos_token_id is 'two'"),
    ],
    ids=["Mixtral", "dynamic NTK", "a word for a number", "end ids"],
)
def test_a_dry_run_refuses_the_model_that_serve_refuses_in_the_same_words(
    model: Path, file: str, changes: dict[str, object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(model / file, **changes)
    said = []
    for flags in (("--dry-run",), ()):
        assert serve("--engine", "torch", "--model", str(model), "-o", str(model.parent / "runs"), *flags) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1]
    assert f"{model / file}" in said[0] and words in said[0]
    assert said[0].count("\n") == 1 and len(said[0]) < 1000
    assert not (model.parent / "runs").exists()


@pytest.mark.parametrize("changes", [MIXTRAL, DYNAMIC], ids=["Mixtral", "dynamic NTK"])
def test_a_dry_run_leaves_other_families_to_tensorrt_llm(
    model: Path, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "standin"))
    edit(model / "config.json", **changes)
    assert serve("--engine", "tensorrt-llm", "--model", str(model), "--dry-run") == 0
    assert "--engine tensorrt-llm" in capsys.readouterr().out


def test_two_dry_runs_share_no_port_and_no_directory(capsys: pytest.CaptureFixture[str]) -> None:
    def unshared() -> set[str]:
        assert serve("--engine", "paced", "--dry-run") == 0
        said = capsys.readouterr().out
        return set(re.findall(r"127\.0\.0\.1:\d+", said)) | set(re.findall(r"DYN_FILE_KV=\S+", said))

    assert not unshared() & unshared()


def test_the_examples_of_the_help_run_as_pasted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(Path(__file__).with_name("split.yaml"), tmp_path / "hosts.yaml")
    monkeypatch.chdir(tmp_path)
    assert serve("--help") == 0
    said = capsys.readouterr().out
    examples = re.findall(r"^ *trtx serve(.*)$", said, re.MULTILINE)
    assert len(examples) >= 4
    for example in examples:
        if "--gpus" not in example:
            port = ("--port", "8000") if "--hosts" in example else ()  # serve types 0, which no other host would know
            assert app.run(["serve", *(port or ("--port", "0")), *example.split(), "--dry-run"]) == 0, example
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.slow
def test_the_help_imports_no_engine() -> None:
    program = (
        "import sys; from trtx.cli import app; code = app.run(['serve', '--help'])\n"
        "slow = {'torch', 'dynamo', 'pandas', 'transformers', 'tensorrt_llm'} & set(sys.modules)\n"
        "sys.exit(repr(slow) if slow else code)"
    )
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ}, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_spec_has_what_was_typed() -> None:
    spec = build_spec(mode="disagg", prefill=2, gpus="3,1", config=["decode=d.yaml"], overrides=["a=1"])
    assert spec.roles == {"prefill": 2, "decode": 1}
    assert spec.gpus == (3, 1)
    assert spec.engine_configs == {"decode": Path("d.yaml")}
    assert spec.overrides == ("a=1",)


def test_a_port_that_no_machine_has_is_refused() -> None:
    with pytest.raises(UsageError, match="--port 70000"):
        build_spec(mode="agg", port=70000)


def test_memory_for_media_below_one_file_is_refused_by_the_name_of_its_option() -> None:
    with pytest.raises(UsageError, match="^--media-memory-bytes is 60000, but one file may have 33554432 bytes"):
        build_spec(mode="agg", media_memory_bytes=60_000)
