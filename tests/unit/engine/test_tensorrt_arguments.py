"""An engine config becomes exactly the keywords that each of TensorRT-LLM's classes takes."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtx.engine.tensorrt_llm.arguments import for_encoder, for_llm, world_size
from trtx.errors import UsageError


def test_the_pytorch_backend_gets_the_config_as_it_is() -> None:
    config = {"backend": "pytorch", "tensor_parallel_size": 2, "enable_attention_dp": True, "max_batch_size": 8}
    assert for_llm(config) == {
        "tensor_parallel_size": 2,
        "enable_attention_dp": True,
        "max_batch_size": 8,
        "return_perf_metrics": True,
        "guided_decoding_backend": "xgrammar",
    }
    assert for_llm({"return_perf_metrics": False})["return_perf_metrics"] is False


@pytest.mark.parametrize("backend", ["llguidance", None])
def test_the_configs_backend_of_grammars_is_kept(backend: str | None) -> None:
    assert for_llm({"guided_decoding_backend": backend})["guided_decoding_backend"] == backend


def test_autodeploy_gets_world_size_and_each_argument_that_it_refuses_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = {
        "backend": "_autodeploy",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "enable_attention_dp": True,
        "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
        "max_seq_len": 512,
    }
    with caplog.at_level(logging.WARNING):
        arguments = for_llm(config)
    assert arguments == {"max_seq_len": 512, "world_size": 4, "return_perf_metrics": True}
    named = [record.getMessage() for record in caplog.records]
    assert [text.split()[0] for text in named] == [
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "enable_attention_dp",
        "scheduler_config",
    ]
    assert "world_size 4" in named[0]


@given(tp=st.integers(1, 8), pp=st.none() | st.integers(1, 4), cp=st.none() | st.integers(1, 2))
def test_the_world_has_a_rank_for_each_share_of_the_model(tp: int, pp: int | None, cp: int | None) -> None:
    config = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "context_parallel_size": cp}
    assert world_size(config) == tp * (pp or 1) * (cp or 1)
    assert world_size(config | {"backend": "_autodeploy", "world_size": 3}) == 3


def test_an_encoder_gets_what_it_takes_and_a_batch_size_in_any_case(caplog: pytest.LogCaptureFixture) -> None:
    config = {"max_num_tokens": 1024, "dtype": "float16", "trust_remote_code": True, "max_batch_size": None}
    assert for_encoder({**config, "backend": "pytorch"}, "Qwen2_5_VLForConditionalGeneration") == {
        "dtype": "float16",
        "max_batch_size": 4,
        "trust_remote_code": True,
    }
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == "max_num_tokens is not handed to MultimodalEncoder and was dropped, it was 1024"
    assert for_encoder({"max_batch_size": 64}, "Qwen3VLForConditionalGeneration") == {"max_batch_size": 64}


def test_an_architecture_without_an_encoder_of_its_own_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="Llama4ForConditionalGeneration has no standalone encoder"):
        for_encoder({}, "Llama4ForConditionalGeneration")
