from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.resolved import resolve
from trtx.config import check_engine_configs, refuse_errors
from trtx.config.engine_config import load_engine_config
from trtx.errors import UsageError


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("max_batch_sze=8", "max_batch_sze; did you mean max_batch_size?"),
        ("kv_cache_config.tokens_per_blok=4", "did you mean kv_cache_config.tokens_per_block?"),
        ("kv_cache_config.free_gpu_memory_fraction=1.5", "expected 0..1"),
        ("dtype=fp7", "expected one of auto, float16, bfloat16, float32"),
        ("max_batch_size=abc", "expected int"),
        ("max_batch_size=0", "expected at least 1"),
        ("kv_cache_config=5", "expected KvCacheConfig"),
        ("onboard=[", "is not YAML"),
        ("max_batch_size", "is not an assignment"),
        ("model=other", "model is set (agg, --set)"),
        ("paced_itl_ms=4", "unknown field paced_itl_ms"),
    ],
)
def test_a_wrong_override_is_refused_with_its_path_and_what_was_expected(assignment: str, expected: str) -> None:
    with pytest.raises(UsageError, match=".*") as refused:
        resolve("agg", assignment)
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["agg.agg.max_batch_size=4"], "unknown field agg; known here"),
        (["max_batch_size=4", "agg.agg.max_batch_size=4", "agg.agg.dtype=auto"], "unknown field agg; known here"),
        (["kv_cache_config={tokens_per_blok: 4}"], "unknown field kv_cache_config.tokens_per_blok"),
    ],
)
def test_a_field_that_an_override_makes_above_or_below_its_own_is_not_blamed_on_the_file(
    tmp_path: Path, overrides: list[str], said: str
) -> None:
    file = tmp_path / "agg.yaml"
    file.write_text("max_num_tokens: 64\nkv_cache_config: {dtype: auto}\n")
    with pytest.raises(UsageError) as refused:
        resolve("agg", *overrides, path=file)
    wrong = next(text for text in overrides if not text.startswith("max"))
    assert said in str(refused.value) and f" (agg, --set {wrong})" in str(refused.value)
    assert "agg.yaml" not in str(refused.value)


def test_what_the_file_says_is_its_own_whatever_stands_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "agg.yaml"
    file.write_text("agg: {dtype: auto}\n")
    with pytest.raises(UsageError) as refused:
        resolve("agg", "agg.agg.max_batch_size=4", path=file)
    assert f"(agg, {file})" in str(refused.value)


def test_a_rule_names_set_for_a_value_in_a_section_that_was_set_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("kv_cache_config: {dtype: fp8}\n")
    configs = {
        role: load_engine_config(role, family="none", path=file, overrides=overrides, engine="tensorrt-llm")
        for role, overrides in (("prefill", ()), ("decode", ("decode.kv_cache_config={dtype: auto}",)))
    }
    (found,) = [one for one in check_engine_configs(configs) if one.path == "kv_cache_config.dtype"]  # type: ignore[arg-type]
    assert f"fp8 (prefill, {file}) but auto (decode, --set)" in found.message
    assert found.fix == "--set decode.kv_cache_config.dtype=fp8", "the file's value is kept"


def test_later_assignments_win_and_a_role_wins_over_all() -> None:
    resolved = resolve("decode", "decode.max_batch_size=4", "max_batch_size=8", "prefill.max_batch_size=2")
    assert resolved.values["max_batch_size"] == 4
    assert "decode: max_batch_size = 4 from --set, was 8" in resolved.reasons


def test_a_disaggregated_role_gets_a_kv_transport_unless_its_config_says_otherwise() -> None:
    assert resolve("prefill").values["cache_transceiver_config"] == {"backend": "DEFAULT"}
    assert resolve("decode", "cache_transceiver_config.backend=UCX").values["cache_transceiver_config"] == {
        "backend": "UCX"
    }
    assert "cache_transceiver_config" not in resolve("agg").values


def test_null_switches_a_nested_model_off() -> None:
    assert resolve("agg", "cuda_graph_config=null").values == {"cuda_graph_config": None}


def test_an_engine_takes_its_own_fields() -> None:
    assert resolve("agg", "paced_itl_ms=4", engine="paced").values == {"paced_itl_ms": 4}


@pytest.mark.parametrize("text", ["- 1\n", "a: [", "\xff\xfe"])
def test_a_file_that_is_no_mapping_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "agg.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match="agg.yaml"):
        resolve(path=path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be read"):
        resolve(path=tmp_path / "absent.yaml")


@pytest.mark.parametrize("engine", ["torch", "tensorrt-llm", "simulated"])
def test_prefill_and_decode_must_agree_on_what_a_block_is(engine: str) -> None:
    prefill = resolve("prefill", "kv_cache_config.tokens_per_block=16", "disable_overlap_scheduler=true")
    agreeing = resolve("decode", "kv_cache_config.tokens_per_block=16")
    refuse_errors(check_engine_configs({"prefill": prefill, "decode": agreeing}, engine=engine))
    findings = check_engine_configs({"prefill": prefill, "decode": resolve("decode")}, engine=engine)
    with pytest.raises(UsageError, match=r"tokens_per_block 16 \(prefill, --set\) but 32 \(decode, default\)"):
        refuse_errors(findings)


def test_two_errors_are_both_named() -> None:
    with pytest.raises(UsageError) as refused:
        resolve("agg", "max_batch_sze=8", "dtype=fp7")
    assert "2 findings" in str(refused.value)
    assert "did you mean max_batch_size?" in str(refused.value)
    assert "dtype is 'fp7'" in str(refused.value)


def test_a_name_of_another_version_is_a_note_for_an_engine_that_ignores_it() -> None:
    newer = resolve("agg", "kv_cache_config.block_reuse_config={policy: per_request}", engine="torch")
    (finding,) = check_engine_configs({"agg": newer}, engine="torch")
    assert (finding.severity, finding.rule) == ("note", "other-version")
    assert check_engine_configs({"agg": newer}, engine="paced") == ()
    with pytest.raises(UsageError, match="other-version"):
        resolve("agg", "kv_cache_config.block_reuse_config={policy: per_request}", engine="tensorrt-llm")
