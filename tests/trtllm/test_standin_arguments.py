"""Arguments of the stand-in's LLM: known names with their defaults, refusals, the merge of a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("only_standin")


def test_args_hold_every_field_with_its_default(api: Any) -> None:
    args = api.TorchLlmArgs(model="/m", kv_cache_config={"tokens_per_block": 64})
    assert (args.tensor_parallel_size, args.enable_attention_dp, args.max_seq_len) == (1, False, None)
    assert args.kv_cache_config.tokens_per_block == 64
    assert args.kv_cache_config.free_gpu_memory_fraction == 0.9
    assert args.load_format is api.LoadFormat.AUTO
    assert args.scheduler_config.capacity_scheduler_policy is api.CapacitySchedulerPolicy.GUARANTEED_NO_EVICT


def test_sections_may_be_objects(api: Any) -> None:
    batching = api.DynamicBatchConfig(
        enable_batch_size_tuning=True, enable_max_num_tokens_tuning=False, dynamic_batch_moving_average_window=128
    )
    scheduler = api.SchedulerConfig(
        capacity_scheduler_policy=api.CapacitySchedulerPolicy.MAX_UTILIZATION, dynamic_batch_config=batching
    )
    args = api.TorchLlmArgs(model="/m", scheduler_config=scheduler)
    assert args.scheduler_config.dynamic_batch_config.dynamic_batch_moving_average_window == 128


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"enable_sleep": True}, "enable_sleep"),  # 1.2.1's name
        ({"kv_cache_config": {"onboard_blocks": True}}, "onboard_blocks"),
        ({"kv_cache_config": {"free_gpu_memory_fraction": 1.5}}, "free_gpu_memory_fraction"),
        ({"dtype": "float8"}, "dtype"),
        ({"backend": "tensorrt"}, "tensorrt"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    api: Any, model_directory: str, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        api.LLM(model_directory, **arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"speculative_config": {"decoding_type": "NGram", "max_draft_len": 2}}, "speculative_config"),
        ({"enable_lora": True}, "enable_lora"),
        ({"encode_only": True}, "encode_only"),
    ],
)
def test_what_only_the_real_package_does_is_no_silent_pass(
    api: Any, model_directory: str, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(NotImplementedError, match=f"the stand-in for tensorrt_llm has no {named}"):
        api.LLM(model_directory, **arguments)


def test_a_model_that_would_have_to_be_downloaded(api: Any) -> None:
    with pytest.raises(NotImplementedError, match="download"):
        api.LLM("Qwen/Qwen3-0.6B")


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE"])
def test_a_launchers_variables_break_the_start(
    api: Any, model_directory: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("OMPI_MCA_coll_ucc_enable", "0")  # a site's setting is none
    with pytest.raises(RuntimeError, match=rf"MPI_Init.*\({variable}\)"):
        api.LLM(model_directory)


def test_ranks_need_gpus(api: Any, model_directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(RuntimeError, match="Only 1 GPUs are available, but 4 are required"):
        api.LLM(model_directory, tensor_parallel_size=2, pipeline_parallel_size=2)


def test_a_file_lies_over_the_arguments(api: Any, tmp_path: Path) -> None:
    path = tmp_path / "extra.yaml"
    path.write_text(
        "kv_cache_config: {dtype: fp8}\ncache_transceiver_config: {backend: UCX}\nhf_revision: main\n", encoding="utf-8"
    )
    before = {
        "max_batch_size": 8,
        "kv_cache_config": api.KvCacheConfig(free_gpu_memory_fraction=0.5),
        "cache_transceiver_config": {"backend": "NIXL", "max_tokens_in_buffer": 64},
    }
    merged = api.update_llm_args_with_extra_options(before, str(path))
    assert merged["revision"] == "main"
    assert merged["cache_transceiver_config"] == {"backend": "UCX"}  # shallow
    assert merged["kv_cache_config"].model_dump(exclude_unset=True) == {
        "free_gpu_memory_fraction": 0.5,
        "dtype": "fp8",
    }  # field by field


def test_greedy_choices_need_the_variable(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TLLM_ALLOW_N_GREEDY_DECODING", raising=False)
    with pytest.raises(ValueError, match="does not allow multiple returns"):
        api.SamplingParams(n=2)
    monkeypatch.setenv("TLLM_ALLOW_N_GREEDY_DECODING", "1")
    assert api.SamplingParams(n=2).best_of == 2
