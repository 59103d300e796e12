"""Configuration objects of LLM: strict in themselves, and never taken without effect where answers hang on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("only_standin")


def test_speculative_configurations_have_the_real_ones_defaults_and_older_names(api: Any) -> None:
    mtp = api.MTPDecodingConfig(num_nextn_predict_layers=2, relaxed_topk=3, speculative_model_dir="/m")
    assert (mtp.decoding_type, mtp.max_draft_len, mtp.max_total_draft_tokens) == ("MTP", 2, 2)
    assert (mtp.speculative_model, mtp.num_nextn_predict_layers) == ("/m", None)
    eagle = api.EagleDecodingConfig(max_draft_len=2, speculative_model="/d", eagle_choices="[[0], [0, 1]]")
    assert eagle.eagle_choices == [[0], [0, 1]]
    assert eagle.eagle3_one_model
    assert api.PARDDecodingConfig(max_draft_len=3, sa_config={"threshold": 2}).sa_config.threshold == 2
    assert api.SaveHiddenStatesDecodingConfig(output_directory="/o").max_total_draft_tokens == 1
    given = api.TorchLlmArgs(model="/m", speculative_config={"decoding_type": "NGram", "max_draft_len": 2})
    assert isinstance(given.speculative_config, api.NGramDecodingConfig)


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("NGramDecodingConfig", {"max_matching_ngram_size": 2}, "max_draft_len must be > 0 for NGram"),
        ("NGramDecodingConfig", {"max_draft_len": 2, "ngram": 2}, "ngram"),
        ("EagleDecodingConfig", {"max_draft_len": 2}, "Draft model must be provided"),
        ("DraftTargetDecodingConfig", {"max_draft_len": 2}, "speculative_model must be specified"),
        ("MTPDecodingConfig", {"max_draft_len": 0}, "max_draft_len must be > 0 for MTP"),
        ("AutoDecodingConfig", {"max_concurrency": 2, "draft_len_schedule": {1: 2}}, "mutually exclusive"),
        ("PARDDecodingConfig", {"sa_config": {"threshold": 0}}, "threshold"),
        ("RocketSparseAttentionConfig", {"window": 2}, "window"),
        ("QuantConfig", {"quant_algo": "FP7"}, "quant_algo"),
        ("CalibConfig", {"device": "tpu"}, "device"),
        ("MpiCommSession", {"n_workers": 0}, "n_workers"),
    ],
)
def test_what_the_class_itself_refuses(api: Any, name: str, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        getattr(api, name)(**arguments)


def test_an_unknown_kind_of_speculation_is_refused(api: Any) -> None:
    with pytest.raises(ValueError, match="Nonesuch"):
        api.TorchLlmArgs(model="/m", speculative_config={"decoding_type": "Nonesuch"})


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("speculative_config", lambda api: api.NGramDecodingConfig(max_draft_len=2)),
        ("sparse_attention_config", lambda api: api.SkipSoftmaxAttentionConfig()),
        ("quant_config", lambda api: api.QuantConfig(quant_algo=api.QuantAlgo.FP8)),
        ("load_format", lambda api: "dummy"),
        ("checkpoint_format", lambda api: "mistral"),
        ("model_kwargs", lambda api: {"num_hidden_layers": 1}),
        ("force_dynamic_quantization", lambda api: True),
        ("kv_cache_config.sink_token_length", lambda api: 4),
    ],
)
def test_an_argument_that_changes_answers_never_passes_unseen(
    api: Any, model_directory: str, argument: str, make: Any
) -> None:
    section, _, field = argument.rpartition(".")
    value = make(api)
    with pytest.raises(NotImplementedError, match=f"the stand-in for tensorrt_llm has no {argument}"):
        api.LLM(model_directory, **({section: {field: value}} if section else {argument: value}))


EFFECTS = """
import json
from tensorrt_llm._impl import effects
from tensorrt_llm._torch.auto_deploy import LlmArgs
from tensorrt_llm.llmapi.llm_args import KvCacheConfig, TorchLlmArgs
of_llm = (effects.ACTED_ON, effects.ONLY_THE_REAL_ONE, effects.WITHOUT_EFFECT)
of_kv = (set(effects.HANDED_ON_NESTED["kv_cache_config"]), effects.KV_ONLY_THE_REAL_ONE, effects.KV_WITHOUT_EFFECT)
fields = {*TorchLlmArgs.model_fields, *LlmArgs.model_fields}
print(json.dumps({
    "llm": {name: sum(name in names for names in of_llm) for name in fields},
    "kv": {name: sum(name in names for names in of_kv) for name in KvCacheConfig.model_fields}}))
"""


@pytest.mark.parametrize("version", ["1.3.0rc22", "1.3.0rc7", "1.2.1"])
def test_it_is_said_of_every_argument_what_becomes_of_it(in_child: Callable[..., Any], version: str) -> None:
    found = in_child(EFFECTS, STANDIN_TRTLLM_VERSION=version)
    for kind in ("llm", "kv"):
        assert {name: count for name, count in found[kind].items() if count != 1} == {}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("AsyncLLM", {}),
        ("MpiCommSession", {"n_workers": 1}),
        ("LoRARequest", {"lora_name": "a", "lora_int_id": 1, "lora_path": "/a"}),
        ("KvCacheRetentionConfig", {}),
    ],
)
def test_objects_of_the_real_package_alone_say_so(api: Any, name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match="only the real package"):
        getattr(api, name)(**arguments)


def test_autodeploys_arguments_refuse_parallel_sizes_themselves(api: Any) -> None:
    from tensorrt_llm._torch.auto_deploy import LlmArgs

    assert LlmArgs(model="/m", scheduler_config={}).backend == "_autodeploy"
    for name, value in (
        ("tensor_parallel_size", 7),
        ("enable_attention_dp", True),
        ("moe_expert_parallel_size", 2),
        ("build_config", {}),
    ):
        with pytest.raises(ValueError, match=f"{name} is not supported by the AutoDeploy backend"):
            LlmArgs(model="/m", **{name: value})
