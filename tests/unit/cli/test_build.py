"""``trtx build`` as typed: what is refused, in one sentence each, before anything is made."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from trtx.checkpoint import resolve_checkpoint
from trtx.cli import app

TINY = "synthetic:tiny-trained"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "80")


def refused(capsys: pytest.CaptureFixture[str], output: Path, *arguments: str) -> str:
    assert app.run(["build", *arguments, "-o", str(output / "builds")]) == 2
    assert not (output / "builds").exists()
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((TINY,), ("--quant is missing", "int4_awq")),
        (("--quant", "fp8"), ("MODEL is missing",)),
        (("/no/such/model", "--quant", "fp8"), ("/no/such/model",)),
        (("synthetic:tiny-traned", "--quant", "fp8"), ("did you mean synthetic:tiny-trained",)),
        ((TINY, "--quant", "nvfp4", "--gpu", "H100"), ("H100", "can't run nvfp4", "Blackwell", "fp8 or int4_awq")),
        ((TINY, "--quant", "fp8", "--gpu", "A100"), ("A100", "can't run fp8", "Ada, Hopper")),
        ((TINY, "--quant", "fp8", "--gpu", "H1000"), ("H1000", "did you mean H100")),
        (
            ("synthetic:tiny-moe", "--quant", "nvfp4"),
            ("mixture of experts", "NVFP4", "--quant fp8 or none"),
        ),
        (("synthetic:tiny-gpt-oss", "--quant", "fp8"), ("mixture of experts", "FP8", "choose --quant none")),
        ((TINY, "--quant", "fp8", "--role", "worker"), ("--role 'worker'", "prefill")),
        ((TINY, "--quant", "fp8", "--role", "agg", "--config", "decode=d.yaml"), ("--config decode", "--role decode")),
        ((TINY, "--quant", "fp8", "--config", "agg=/no/such.yaml"), ("/no/such.yaml",)),
        ((TINY, "--quant", "fp8", "--set", "max_batch_sze=4"), ("max_batch_sze", "max_batch_size")),
        (
            (TINY, "--quant", "fp8", "--set", "prefill.kv_cache_config.tokens_per_block=64"),
            ("tokens_per_block", "prefill", "decode"),
        ),
        ((TINY, "--quant", "fp8", "--calib", "/no/such.jsonl"), ("/no/such.jsonl", "can't be read", '"messages"')),
        ((TINY, "--quant", "fp8", "--backend", "tensorrt"), ("--backend tensorrt", "none is installed")),
        ((TINY, "--quant", "fp8", "--json"), ("--json", "--check")),
    ],
)
def test_bad_input_is_one_sentence_with_exit_2_and_makes_nothing(
    arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, tmp_path, *arguments)
    for word in words:
        assert word in said
    assert said.count("\n") == 1 or "findings" in said  # engine configs have one line each


def test_calibration_text_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.jsonl"
    text.write_bytes(b"\x80\x81\x82")
    assert "line 1 is not text" in refused(capsys, tmp_path, TINY, "--quant", "fp8", "--calib", str(text))
    text.write_bytes(b"")
    assert "is empty" in refused(capsys, tmp_path, TINY, "--quant", "fp8", "--calib", str(text))


def test_a_quantized_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = shutil.copytree(resolve_checkpoint(TINY).path, tmp_path / "model")
    (model / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A16_AWQ"}}))
    assert "is quantized already (W4A16_AWQ)" in refused(capsys, tmp_path, str(model), "--quant", "fp8")


def test_without_modelopt_the_line_that_installs_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "modelopt", None)
    assert "pip install 'trtx[quantize]'" in refused(capsys, tmp_path, TINY, "--quant", "int8_sq")


def test_a_tensorrt_llm_without_the_backend_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "standin"))
    said = refused(capsys, tmp_path, TINY, "--quant", "fp8", "--backend", "tensorrt")
    for word in ("1.3.0rc22", "removed after 1.2", "PR #15767"):
        assert word in said


def test_help_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["build", "--help"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    for option in ("--quant", "--kv-dtype", "--calib", "--max-ppl-increase", "--backend", "--role", "--check"):
        assert option in said
