"""Lists of parameters beside a list of prompts: one for each, or nothing is submitted."""

from __future__ import annotations

import shutil
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from trtx.checkpoint import resolve_checkpoint
from trtx.errors import UsageError
from trtx.torch_engine.llmapi.disaggregated import DisaggregatedParams
from trtx.torch_engine.llmapi.llm import LLM
from trtx.torch_engine.llmapi.request_errors import RequestError
from trtx.torch_engine.llmapi.sampling import SamplingParams


@pytest.mark.parametrize(
    ("inputs", "given", "says"),
    [
        (["a b", "c d"], {"sampling_params": [SamplingParams()]}, "sampling_params has length 1 and inputs 2"),
        (["a b", "c d"], {"sampling_params": []}, "sampling_params has length 0 and inputs 2"),
        (["a b"], {"sampling_params": [SamplingParams()] * 3}, "sampling_params has length 3 and inputs 1"),
        ("a b", {"sampling_params": [SamplingParams()] * 2}, "sampling_params has length 2 and inputs 1"),
        (
            [[5, 6], [7]],
            {"sampling_params": [SamplingParams()] * 2, "disaggregated_params": [DisaggregatedParams()]},
            "disaggregated_params has length 1 and inputs 2; expected one for each, or one for all",
        ),
        (["a b", "c d"], {"lora_request": [None]}, "lora_request has length 1 and inputs 2"),
        (["a b", "c d"], {"cache_salt": ["x", "y", "z"]}, "cache_salt has length 3 and inputs 2"),
    ],
)
def test_a_list_of_another_length_is_refused_before_anything_is_submitted(
    inputs: Any, given: dict[str, Any], says: str
) -> None:
    llm = LLM.__new__(LLM)  # it has no engine: to submit the first prompt would be an AttributeError
    with pytest.raises(ValueError, match=says):
        llm.generate(inputs, **given)


def test_every_argument_of_generate_but_tqdm_may_be_a_list_of_one_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in signature(LLM.generate).parameters if name not in ("self", "inputs", "use_tqdm")]
    asked: list[dict[str, Any]] = []

    class Ended:
        def result(self) -> int:
            return len(asked)

    def generate_async(self: LLM, prompt: str, **given: Any) -> Ended:
        asked.append(given)
        return Ended()

    monkeypatch.setattr(LLM, "generate_async", generate_async)
    llm = LLM.__new__(LLM)
    assert llm.generate(["a b", "c d"], **{name: [f"{name} 1", f"{name} 2"] for name in names}) == [2, 2]
    assert asked == [{name: f"{name} {number}" for name in names} for number in (1, 2)]


@pytest.mark.slow
def test_lists_of_no_adapter_are_taken_and_one_of_an_adapter_is_refused() -> None:
    prompts: list[Any] = [[5, 6, 7], [8, 9]]
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    with LLM("synthetic:tiny", skip_tokenizer_init=True, max_batch_size=2, kv_cache_config={"max_tokens": 512}) as llm:
        plain = llm.generate(prompts, params)
        given = llm.generate(prompts, params, lora_request=[None, None], cache_salt=["a", None], priority=[0.1, 0.9])
        assert isinstance(plain, list) and isinstance(given, list)
        assert [one.outputs[0].token_ids for one in given] == [one.outputs[0].token_ids for one in plain]
        with pytest.raises(RequestError, match="supports no lora_request"):
            llm.generate(prompts, params, lora_request=[None, object()])


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [pytest.param("tiny", marks=pytest.mark.proof), "tiny-llama"]
)  # transformers makes an empty tokenizer, and fails
def test_a_checkpoint_without_a_tokenizer_is_refused_in_one_sentence(shape: str, tmp_path: Path) -> None:
    source = resolve_checkpoint(f"synthetic:{shape}").path
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, tmp_path)
    with pytest.raises(UsageError) as refused:
        LLM(tmp_path, max_batch_size=1, kv_cache_config={"max_tokens": 512})
    said = str(refused.value)
    assert f"{tmp_path} has no tokenizer that transformers can load (" in said and "add the tokenizer.json" in said
    assert "\n" not in said and len(said) < 500
