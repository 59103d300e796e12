from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trtx.cli.app import run

PAIR = ["--check", "--recipe", "deepseek-r1", "--mode", "disagg"]


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = run(["build", *arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_every_shipped_config_passes(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = check(capsys, "--check", "--all")
    assert code == 0
    assert "deepseek-r1-wide-ep, disagg" in text
    assert "error" not in text


def test_an_error_has_field_values_reason_evidence_and_fix_and_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = check(capsys, *PAIR, "--set", "decode.max_num_tokens=200")
    assert code == 2
    assert "deepseek-r1, disagg: 1 error, 1 note (TensorRT-LLM 1.3.0rc22: not read itself" in text
    assert "error    decode          max_num_tokens [tokens-cover-batch]" in text
    assert "max_num_tokens 200 (decode, --set) is below max_batch_size 256" in text
    assert "evidence: 422 of 423 published decode workers" in text
    assert "fix: --set decode.max_num_tokens=256" in text


def test_the_table_fits_80_columns_where_words_allow(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = check(capsys, *PAIR, "--set", "decode.max_num_tokens=200", "--set", "prefill.max_beam_width=2")
    wide = [line for line in text.splitlines()[1:] if len(line) > 80]
    assert wide == []


def test_json_holds_the_same_findings(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = check(capsys, *PAIR, "--set", "decode.kv_cache_config.dtype=auto", "--json")
    (checked,) = json.loads(text)
    assert code == 2
    assert checked["configs"]["decode"] == "engine_configs/deepseek-r1/decode.yaml"
    assert checked["columns"] == ["main-2026-07"]
    (error,) = [finding for finding in checked["findings"] if finding["severity"] == "error"]
    assert error["rule"] == "kv-dtype-equal"
    assert error["roles"] == ["prefill", "decode"]
    assert error["fix"] == "--set decode.kv_cache_config.dtype=fp8"


def test_a_model_is_checked_in_both_modes_with_its_familys_configs(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = check(capsys, "--check", "synthetic:qwen3-0.6b")
    assert code == 0
    assert "qwen3, agg: nothing to say" in text
    assert "prefill: engine_configs/qwen3/prefill.yaml" in text


def test_a_model_of_no_family_is_checked_with_the_engines_defaults(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MistralForCausalLM"]}))
    code, text = check(capsys, "--check", str(tmp_path), "--mode", "disagg")
    assert code == 0
    assert "decode: the engine's defaults" in text


def test_what_a_gpu_cannot_hold_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(capsys, "--check", "synthetic:qwen3-8b", "--mode", "agg", "--gpu", "H200")[0] == 0
    code, text = check(
        capsys, "--check", "synthetic:qwen3-8b", "--mode", "agg", "--gpu", "L4", "--set", "max_num_tokens=1000000"
    )
    assert code == 2
    assert "error    agg             the whole config [memory]" in text


def test_a_file_alone_is_checked_by_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("max_batch_size: 8\ncuda_graph_config: {batch_sizes: [1, 2], max_batch_size: 4}\n")
    code, text = check(capsys, "--check", f"--config=agg={path}")
    assert code == 2
    assert "[graph-sizes-agree]" in text
    code, text = check(capsys, "--check", f"--config=encode={path}")
    assert code == 0
    assert "encode:" in text


def test_the_version_asked_for_is_the_one_that_counts(capsys: pytest.CaptureFixture[str]) -> None:
    wide = ["--check", "--recipe", "deepseek-r1-wide-ep", "--mode", "agg"]
    assert check(capsys, *wide)[0] == 0
    code, text = check(capsys, *wide, "--trtllm-version", "1.3.0rc27")
    assert code == 2
    assert "moe_config.backend [other-version]" in text
    code, text = check(capsys, *wide, "--trtllm-version", "1.3.0rc23")
    assert code == 0
    assert "warning  agg             moe_config.backend [other-version]" in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--check"], "nothing to check; expected a MODEL, --recipe NAME"),
        (["--check", "--recipe", "gptoss120b"], "did you mean gpt-oss-120b?"),
        (["--check", "--recipe", "qwen3", "--trtllm-version", "stable"], "'stable' is not a version of TensorRT-LLM"),
        (["--check", "--recipe", "qwen3", "--mode", "agg", "--set", "decode.max_seq_len=1"], "is for decode workers"),
        (["--check", "no/such-model"], "is not in the Hugging Face cache"),
        (["synthetic:tiny", "--quant", "none", "--json"], "--json has no effect without --check"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
    code, text = check(capsys, *arguments)
    assert code == 2
    assert told in text


@pytest.mark.slow
def test_checking_imports_no_slow_package() -> None:
    program = (
        "import sys; from trtx.cli.app import run; code = run(sys.argv[1:]); "
        "slow = {'torch', 'dynamo', 'pandas', 'tensorrt_llm', 'transformers', 'nixl', 'modelopt'} & set(sys.modules); "
        "sys.exit(f'imported {sorted(slow)}' if slow else code)"
    )
    arguments = ["build", "--check", "synthetic:qwen3-8b", "--gpu", "H200"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_dry_run_tells_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    change = ["--set", "prefill.disable_overlap_scheduler=false"]
    code = run(["serve", "--mode", "disagg", "--engine", "torch", "--port", "0", "--dry-run", *change])
    text = capsys.readouterr().out
    assert code == 0
    assert "Engine configs, worth knowing:" in text
    assert "note     prefill         disable_overlap_scheduler [prefill-overlap]" in text
