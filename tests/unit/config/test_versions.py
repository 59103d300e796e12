from __future__ import annotations

import pytest

from trtx.config.schema import default, findings, findings_for
from trtx.config.versions import COLUMNS, schema_version
from trtx.errors import UsageError


@pytest.mark.parametrize(
    ("version", "columns", "certainty"),
    [
        ("1.2.1", ("1.2.1",), "read"),
        ("1.2.0", ("1.2.1",), "nearest"),
        ("1.3.0rc2", ("1.2.1", "1.3.0rc7"), "between"),
        ("1.3.0rc7", ("1.3.0rc7",), "read"),
        ("1.3.0rc14", ("1.3.0rc7", "main-2026-07"), "between"),
        ("1.3.0rc22", ("main-2026-07",), "nearest"),
        ("1.3.0rc22+cpu", ("main-2026-07",), "nearest"),
        ("1.3.0rc22.post1", ("main-2026-07", "post-rc22"), "between"),
        ("1.3.0rc24.post1", ("post-rc22",), "nearest"),
        ("1.4.0rc1", ("post-rc22",), "nearest"),
        ("2.0", ("post-rc22",), "nearest"),
        ("main-2026-07", ("main-2026-07",), "read"),
    ],
)
def test_a_version_finds_the_column_that_speaks_for_it(version: str, columns: tuple[str, ...], certainty: str) -> None:
    found = schema_version(version)
    assert (found.columns, found.certainty) == (columns, certainty)


def test_what_is_no_version_is_refused() -> None:
    with pytest.raises(UsageError, match="'newest' is not a version of TensorRT-LLM; expected one such as 1.2.1"):
        schema_version("newest")


def test_versions_are_ordered_as_they_were_released() -> None:
    names = ["1.2.1", "1.3.0rc7", "1.3.0rc22", "1.3.0rc22.post1", "1.3.0rc24", "1.3.0", "1.4.0rc1"]
    keys = [schema_version(name).key for name in names]
    assert keys == sorted(keys)
    assert schema_version("1.3.0rc9").is_before("1.3.0rc10")
    assert not schema_version("1.3.0rc10").is_before("1.3.0rc10")


@pytest.mark.parametrize(
    ("values", "version", "told"),
    [
        ({"enable_sleep": True}, "main-2026-07", "it is to 1.2.1, 1.3.0rc7; main-2026-07 has sleep_config"),
        ({"sleep_config": {}}, "1.2.1", "1.2.1 has enable_sleep"),
        ({"kv_cache_config": {"onboard_blocks": True}}, "main-2026-07", "kv_cache_config.onboard_blocks is not known"),
        (
            {"kv_cache_config": {"block_reuse_policy": "per_request"}},
            "1.3.0rc24",
            "post-rc22 has kv_cache_config.block_reuse_config",
        ),
        ({"sampler_type": "auto"}, "1.4.0rc1", "sampler_type is not known to post-rc22"),
        ({"moe_config": {"backend": "WIDEEP"}}, "1.3.0rc27", "moe_config.backend 'WIDEEP' is not known to post-rc22"),
        ({"moe_config": {"backend": "DENSEGEMM"}}, "1.2.1", "it is to 1.3.0rc7, main-2026-07, post-rc22"),
        (
            {"speculative_config": {"decoding_type": "Medusa"}},
            "post-rc22",
            "speculative_config.decoding_type 'Medusa' is not known to post-rc22; it is to 1.2.1",
        ),
        (
            {"speculative_config": {"decoding_type": "Eagle", "speculative_model": "x"}},
            "1.2.1",
            "1.2.1 has speculative_config.speculative_model_dir",
        ),
        ({"cache_transceiver_config": {"transceiver_runtime": "auto"}}, "1.3.0rc22", "it is to post-rc22"),
    ],
)
def test_what_another_version_knows_is_refused_with_that_version(
    values: dict[str, object], version: str, told: str
) -> None:
    (found,) = findings(values, version)
    assert found.kind == "other-version"
    assert told in found.message


def test_what_could_not_be_checked_is_not_refused() -> None:
    unknown = {"ray_worker_extension_cls": "x.Y", "sleep_config": {"restore_modes": {"kv_cache": "NONE"}}}
    assert findings(unknown, "post-rc22") == []
    assert findings({"reasoning_parser": "whatever"}, "1.2.1") == []
    assert findings({"cp_config": {"cp_type": "HELIX"}}, "1.2.1") == []  # a plain mapping there


def test_between_two_columns_only_what_both_refuse_is_certain() -> None:
    values = {"enable_sleep": True, "max_batch_sze": 1, "kv_cache_config": {"onboard_blocks": False}}
    certain, doubtful = findings_for(values, schema_version("1.3.0rc14"))
    assert [found.path for found in certain] == ["max_batch_sze"]
    assert {found.path for found in doubtful} == {"enable_sleep", "kv_cache_config.onboard_blocks"}


@pytest.mark.parametrize(
    ("path", "version", "expected"),
    [
        ("max_batch_size", "1.2.1", None),
        ("max_batch_size", "1.3.0rc22", 2048),
        ("kv_cache_config.tokens_per_block", "1.3.0rc22", 32),
        ("cache_transceiver_config.kv_transfer_timeout_ms", "1.3.0rc22", None),  # no such section by default
        ("cache_transceiver_config", "1.3.0rc22", None),
        ("moe_config.backend", "1.2.1", "CUTLASS"),
        ("moe_config.backend", "1.3.0rc7", "AUTO"),
        ("no.such.field", "1.2.1", None),
    ],
)
def test_defaults_are_those_of_the_version(path: str, version: str, expected: object) -> None:
    assert default(path, schema_version(version)) == expected


def test_a_newer_default_holds_from_its_version_on() -> None:
    path = "cache_transceiver_config.transceiver_runtime"
    held = [default(path, schema_version(name), given=1) for name in ("1.3.0rc24", "1.3.0rc27", "1.4.0rc1")]
    assert held == [None, "auto", "PYTHON"]


@pytest.mark.parametrize("column", COLUMNS)
def test_each_kind_of_speculation_takes_its_own_fields(column: str) -> None:
    suffix_automaton = {"decoding_type": "NGram", "max_draft_len": 3, "mask_token_id": 1}
    (found,) = findings({"speculative_config": suffix_automaton}, column)
    assert (found.path, found.kind) == ("speculative_config.mask_token_id", "unknown-field")
    (found,) = findings({"speculative_config": {"max_draft_len": 3}}, column)
    assert (found.path, found.kind) == ("speculative_config.decoding_type", "missing-field")


def test_autodeploy_has_arguments_of_its_own() -> None:
    assert findings({"backend": "_autodeploy", "world_size": 2, "compile_backend": "torch-opt"}) == []
    (found,) = findings({"world_size": 2})
    assert found.kind == "unknown-field"


@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        ({"cuda_graph_config": {"batch_sizes": [1, 0]}}, "cuda_graph_config.batch_sizes", "each > 0"),
        ({"cuda_graph_config": {"batch_sizes": [1, "2"]}}, "cuda_graph_config.batch_sizes", "list[int]"),
        ({"kv_cache_config": {"pool_ratio": [0.5, 0.4]}}, "kv_cache_config.pool_ratio", "sum to 1"),
        ({"nvfp4_gemm_config": {"allowed_backends": ["cuda"]}}, "nvfp4_gemm_config.allowed_backends", "one of cutlass"),
        ({"cache_transceiver_config": "UCX"}, "cache_transceiver_config", "CacheTransceiverConfig"),
        ({"kv_cache_config": None}, "kv_cache_config", "KvCacheConfig"),
        ({"stream_interval": 0}, "stream_interval", "> 0"),
        ({"enable_chunked_prefill": 1}, "enable_chunked_prefill", "bool"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size", "int"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size", "at least 1"),
    ],
)
def test_a_value_is_refused_with_what_was_expected(values: dict[str, object], path: str, expected: str) -> None:
    (found,) = findings(values)
    assert found.path == path
    assert expected in found.message


def test_load_format_is_taken_in_either_case() -> None:
    assert findings({"load_format": "dummy"}) == []
    assert len(findings({"load_format": "dumy"})) == 1
