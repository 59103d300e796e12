"""``trtx build`` with the real ModelOpt on a CPU: the build is proved, found again, gated and served.

``make test`` builds once, with few calibration texts and a short proof. ``make proof`` builds each format in full.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from topology_clients import post, trtx_serve

MODEL = "synthetic:tiny-trained"
FP8 = ("--quant", "fp8", "--set", "max_batch_size=16")
SHORT = (*FP8, "--calib-size", "16")
SHORT_PROOF = "from trtx.build import proof; proof.TEXTS, proof.PROMPTS = 60, 32; "
PROMPT = "What is 23 + 45?"  # which the unquantized model answers right, with room to spare


def trtx_build(output: Path, *arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Builds in a process of its own, because ModelOpt changes how transformers ties weights in the whole process."""
    command = [sys.executable, "-c", f"{before}from trtx.cli.app import main; main()", "build", MODEL, *arguments]
    return subprocess.run(
        [*command, "-o", str(output)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def built(output: Path, *arguments: str, before: str = "") -> Path:
    done = trtx_build(output, *arguments, before=before)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1].removeprefix("trtx serve --model "))


def manifest_of(build: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((build / "manifest.json").read_text(encoding="utf-8"))
    return manifest


def answer(build: Path) -> str:
    """What the served build says to PROMPT."""
    with trtx_serve("--model", str(build), "--engine", "torch") as serve:
        plan = serve.wait_ready()
        assert plan.engine_configs["agg"]["max_batch_size"] == 16
        body = {"model": plan.model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8}
        status, said = post(plan.url, "/v1/chat/completions", body | {"temperature": 0})
        assert status == 200, said
        return str(said["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("builds")


@pytest.fixture(scope="module")
def fp8(output: Path) -> Path:
    return built(output, *SHORT, before=SHORT_PROOF)


def test_an_fp8_build_is_a_checkpoint_with_configs_and_a_proof_of_real_figures(fp8: Path) -> None:
    manifest = manifest_of(fp8)
    assert fp8.name == manifest["name"] == f"tiny-trained-fp8-{manifest['key'][:8]}"
    config = json.loads((fp8 / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "FP8"
    assert config["rope_theta"] == 10000.0  # the source's own field, which transformers 5 would have renamed
    assert json.loads((fp8 / "hf_quant_config.json").read_text())["quantization"]["quant_algo"] == "FP8"
    assert sorted(path.name for path in (fp8 / "engine_configs").iterdir()) == [
        "agg.yaml",
        "decode.yaml",
        "prefill.yaml",
    ]
    assert {"calibrating", "exporting", "proving"} <= manifest["seconds"].keys()
    assert manifest["inputs"]["recipe"] == "FP8_DEFAULT_CFG"
    assert manifest["inputs"]["calibration"]["source"] == "built-in"
    assert manifest["inputs"]["versions"]["nvidia-modelopt"]
    assert manifest["weight_bytes"]["result"] < 0.6 * manifest["weight_bytes"]["source"]
    assert manifest["proof"]["prompts"] == 32
    assert 26 < manifest["proof"]["source_perplexity"] < 28
    assert_costs_little(manifest["proof"], at_least=4_000)


def assert_costs_little(proved: dict[str, Any], *, at_least: int) -> None:
    """The figures of an eight-bit build, over ``at_least`` tokens of held-out text."""
    assert proved["tokens"] > at_least
    assert proved["perplexity"] != proved["source_perplexity"]
    assert abs(proved["increase_pct"]) < 0.5
    assert 0.6 < proved["greedy_agreement"] < 0.95  # half of the prompts are text, which continues with many near ties


def test_the_same_inputs_find_the_build_and_a_missed_gate_marks_it(fp8: Path, output: Path) -> None:
    modified = (fp8 / "model.safetensors").stat().st_mtime_ns
    missed = trtx_build(output, *SHORT, "--max-ppl-increase", "-5")
    assert missed.returncode == 1
    assert "past --max-ppl-increase -5; the build is kept" in missed.stderr
    assert manifest_of(fp8)["gate"] == {"max_ppl_increase_pct": -5.0, "passed": False}
    assert built(output, *SHORT, "--max-ppl-increase", "5") == fp8
    assert manifest_of(fp8)["gate"] == {"max_ppl_increase_pct": 5.0, "passed": True}
    assert (fp8 / "model.safetensors").stat().st_mtime_ns == modified


def test_a_build_is_served_with_the_engine_config_that_it_carries(fp8: Path) -> None:
    assert answer(fp8) == "68"


@pytest.mark.proof
def test_every_format_is_built_and_served_and_costs_what_it_promises(output: Path) -> None:
    forms = ("fp8", "int8_sq", "int4_awq", "nvfp4")
    builds = {form: built(output, "--quant", form, "--set", "max_batch_size=16") for form in forms}
    proved = manifest_of(builds["fp8"])["proof"]
    assert 27 < proved["source_perplexity"] < 29  # training gives 27.17 for other texts of the same kind
    assert_costs_little(proved, at_least=30_000)
    cost = {form: manifest_of(build)["proof"]["increase_pct"] for form, build in builds.items()}
    # Eight bits cost less than four, and four-bit weights less than four-bit weights and activations.
    assert max(cost["fp8"], cost["int8_sq"]) < cost["int4_awq"] < cost["nvfp4"]
    size = {form: manifest_of(build)["weight_bytes"]["result"] for form, build in builds.items()}
    assert max(size["int4_awq"], size["nvfp4"]) < min(size["fp8"], size["int8_sq"])
    for build in builds.values():
        assert answer(build) == "68"


@pytest.mark.proof
def test_an_fp8_kv_cache_is_built_and_served(output: Path) -> None:
    build = built(output, "--quant", "fp8", "--kv-dtype", "fp8", "--set", "max_batch_size=16")
    assert json.loads((build / "hf_quant_config.json").read_text())["quantization"]["kv_cache_quant_algo"] == "FP8"
    assert "dtype: fp8" in (build / "engine_configs" / "agg.yaml").read_text()
    assert answer(build) == "68"
