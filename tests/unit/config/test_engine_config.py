from __future__ import annotations

from pathlib import Path

import pytest

from trtx.config import ResolvedEngineConfig, check_pair, resolve_engine_config
from trtx.config.engine_config import CONFIG_ROOT
from trtx.errors import UsageError


def resolve(
    role: str = "agg", *overrides: str, path: Path | None = None, engine: str = "torch"
) -> ResolvedEngineConfig:
    return resolve_engine_config(role, family="none", path=path, overrides=overrides, engine=engine)  # type: ignore[arg-type]


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
        ("onboard=[", "is not a YAML value"),
        ("max_batch_size", "is not an assignment"),
        ("model=other", "--model"),
        ("paced_itl_ms=4", "unknown field paced_itl_ms"),
    ],
)
def test_a_wrong_override_is_refused_with_its_path_and_what_was_expected(assignment: str, expected: str) -> None:
    with pytest.raises(UsageError, match=".*") as refused:
        resolve("agg", assignment)
    assert expected in str(refused.value)


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


def test_prefill_and_decode_must_agree_on_what_a_block_is() -> None:
    prefill = resolve("prefill", "kv_cache_config.tokens_per_block=16")
    check_pair(prefill, resolve("decode", "kv_cache_config.tokens_per_block=16"))
    with pytest.raises(UsageError, match=r"tokens_per_block 16 \(prefill, --set\) but 32 \(decode, default\)"):
        check_pair(prefill, resolve("decode"))


@pytest.mark.parametrize("path", sorted(CONFIG_ROOT.rglob("*.yaml")), ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_shipped_config_is_known_to_the_schema(path: Path) -> None:
    resolve_engine_config(path.stem, family=path.parent.name, path=None, overrides=(), engine="torch")  # type: ignore[arg-type]
