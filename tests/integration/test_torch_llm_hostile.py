"""One request against everybody's engine: each is refused with one sentence or served, and others go on as alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from trtx.torch_engine.llmapi import LLM, DisaggregatedParams, Logprob, RequestError, RequestFailed, SamplingParams
from trtx.torch_engine.llmapi.sampling import FIELDS

pytestmark = pytest.mark.proof  # an engine; make test has test_worker.py and test_sampling_params.py

CONTEXT = 128
LONG_PROMPT = [7 + at % 50 for at in range(CONTEXT - 8)]  # leaves room for 8 tokens, whatever max_tokens says
NEIGHBOURS = [
    ([5, 6, 7, 8], SamplingParams(max_tokens=10, ignore_eos=True)),
    ([9, 8, 7], SamplingParams(max_tokens=10, ignore_eos=True, temperature=1.2, top_p=0.9, seed=3, logprobs=1)),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        "synthetic:tiny", max_batch_size=8, max_seq_len=CONTEXT, kv_cache_config={"max_tokens": 2048},
        cache_transceiver_config={"backend": "NIXL"},
    ) as engine:  # fmt: skip
        yield engine


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return [llm.generate_async(prompt, params).result(60).outputs[0].token_ids for prompt, params in NEIGHBOURS]


def answer(llm: LLM, inputs: Any, *, made: Any = None, **arguments: Any) -> Any:
    """The request's output, or the one sentence with which it was refused."""
    try:
        return llm.generate_async(inputs, made, **arguments).result(60)
    except (ValueError, RequestError) as error:
        said = str(error)
        assert 10 < len(said) < 1000, said
        assert "\n" not in said and "Traceback" not in said, said
        return said


def beside(llm: LLM, expected: list[list[int]], ask: Any) -> Any:
    """What ``ask`` returns, between two requests whose tokens must be those that they have alone."""
    first, second = (llm.generate_async(prompt, params) for prompt, params in NEIGHBOURS)
    given_back = ask()
    assert [output.result(60).outputs[0].token_ids for output in (first, second)] == expected
    assert llm._check_health()
    return given_back


# --- the whole of SamplingParams ---

_EXTREME_FLOATS = st.sampled_from(
    [0.0, -0.0, 5e-324, 1e-46, 1e-40, 1e-30, 0.5, 1.0, 1e30, 1e300, 1.7e308, -1e300, -1e-46, float("inf"), float("nan")]
)
_EXTREME_INTS = st.sampled_from(
    [0, 1, 2, 3, -1, 2**31 - 1, 2**31, 2**63, 2**64 - 1, 2**64, 10**30, 10**5000, -(10**400)]
)
_ODD = st.one_of(
    _EXTREME_FLOATS,
    _EXTREME_INTS,
    st.booleans(),
    st.none(),
    st.sampled_from([b"x", "", "x", "\ud800", ..., (), {}, {"a": 1}, [None], ["x"], [[1]], {1}, np.float32(0.5)]),
    st.sampled_from([np.int64(3), np.array([1, 2]), np.nan, 1j, range(3), 3.5, "5", [10**40], [-1], [2**31], [""]]),
    st.lists(st.integers(0, 2**31 - 1), max_size=4),
    st.lists(st.text(max_size=4), max_size=4),
)
_SUITABLE: dict[str, st.SearchStrategy[Any]] = {
    "stop_token_ids": st.sampled_from([[], [0, 1, 2], list(range(3000)), list(range(200_000))]),
    "stop": st.one_of(st.text(min_size=1, max_size=3), st.lists(st.text(min_size=1, max_size=3), max_size=5)),
    "n": st.integers(1, 3),
    "logprobs": st.sampled_from([0, 1, 5, 1024, True, False, 10**9]),
    "prompt_logprobs": st.sampled_from([0, 1, 5, 1024, True, 10**9]),
    "min_tokens": st.integers(0, 9),
    "max_tokens": st.sampled_from([1, 3, 8, 10**12, None]),
    **{name: st.booleans() for name in ("ignore_eos", "detokenize", "skip_special_tokens", "add_special_tokens")},
    **{
        name: st.one_of(_EXTREME_FLOATS, st.floats())
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "temperature", "top_p", "min_p")
    },
}
_PARAMS = st.lists(st.sampled_from([*sorted(FIELDS), *_SUITABLE]), min_size=1, max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: _SUITABLE.get(name, _ODD) for name in names})
)


@settings(
    max_examples=examples(150),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(fields=_PARAMS)
@example(fields={"temperature": 1e-46})
@example(fields={"repetition_penalty": 1e-40, "temperature": 1.0})
@example(fields={"presence_penalty": 1e300, "frequency_penalty": -1e300, "repetition_penalty": 1e300})
@example(fields={"min_tokens": 4, "stop_token_ids": list(range(200_000))})
@example(fields={"stop_token_ids": [-1]})
@example(fields={"stop_token_ids": 5})
@example(fields={"stop_token_ids": ["x"]})
@example(fields={"logprobs": True, "prompt_logprobs": True})
@example(fields={"max_tokens": None})
@example(fields={"temperature": 10**5000})
@example(fields={"n": 10**9, "temperature": 1.0})
def test_whatever_sampling_params_hold_is_refused_or_served_and_harms_nobody(
    llm: LLM, expected: list[list[int]], fields: dict[str, Any]
) -> None:
    try:
        params = SamplingParams(**fields)
    except ValueError as error:
        said = str(error)
        assert said.startswith("SamplingParams") and len(said) < 1000 and "\n" not in said, said
        return
    output = beside(llm, expected, lambda: answer(llm, LONG_PROMPT, made=params))
    if not isinstance(output, str):
        assert output.finished
        assert all(choice.finish_reason in ("length", "stop") for choice in output.outputs)


def test_what_is_assigned_later_is_checked_as_well(llm: LLM, expected: list[list[int]]) -> None:
    for name, value in (("temperature", "x"), ("stop_token_ids", [-1]), ("n", 10**9), ("stop", [""]), ("seed", 2**64)):
        params = SamplingParams(max_tokens=4)
        setattr(params, name, value)
        assert f"SamplingParams.{name} is" in beside(llm, expected, lambda params=params: answer(llm, [5], made=params))
    assert "sampling_params is 5" in answer(llm, [5], made=5)


# --- what else a request carries ---


@pytest.mark.parametrize(
    "inputs",
    [
        [], "", None, 5, 5.5, b"abc", ..., [5, -1], [5, 2**31], [5, 2**63], [5, 10**40], [True], ["5"], [None],
        [[5]],
        "a\ud800b", {"prompt": 5}, {"prompt": "a\ud800"}, {"prompt_token_ids": [5, -7]}, {"prompt_token_ids": 5}, {},
        [5] * 300_000, {"prompt": "x", "multi_modal_data": {"image": 1}}, range(3), np.array([1, 2]), [np.int64(5)],
    ],
    ids=lambda inputs: repr(inputs)[:30],
)  # fmt: skip
def test_a_prompt_that_is_none_is_refused_alone(llm: LLM, expected: list[list[int]], inputs: Any) -> None:
    assert isinstance(beside(llm, expected, lambda: answer(llm, inputs)), str)


@pytest.mark.parametrize(
    "arguments",
    [
        {"cache_salt": 3}, {"cache_salt": b"x"}, {"cache_salt": "\ud800"}, {"cache_salt": ...},
        {"priority": float("nan")}, {"priority": float("inf")}, {"priority": -1}, {"priority": 10**400},
        {"priority": "high"}, {"priority": None}, {"lora_request": ...},
        {"disaggregated_params": {}}, {"disaggregated_params": 5},
    ],
    ids=repr,
)  # fmt: skip
def test_an_argument_that_makes_no_sense_is_refused_alone(
    llm: LLM, expected: list[list[int]], arguments: dict[str, Any]
) -> None:
    assert isinstance(beside(llm, expected, lambda: answer(llm, [5, 6], **arguments)), str)


@pytest.mark.parametrize("salt", ["", "x", "\N{SNOWMAN}" * 10_000, None])
def test_any_text_is_a_salt(llm: LLM, expected: list[list[int]], salt: str | None) -> None:
    assert beside(llm, expected, lambda: answer(llm, LONG_PROMPT, cache_salt=salt)).finished


_TOKENS = [dict.fromkeys([5], Logprob(-1.0, 1))]


@pytest.mark.parametrize(
    "fields",
    [
        {"first_gen_tokens": [-1]}, {"first_gen_tokens": [2**31]}, {"first_gen_tokens": [10**40]},
        {"first_gen_tokens": ["x"]}, {"first_gen_tokens": 5}, {"first_gen_tokens": []}, {},
        {"first_gen_tokens": [5, 6], "first_gen_log_probs": _TOKENS},
        {"first_gen_tokens": [6], "first_gen_log_probs": _TOKENS},
        {"first_gen_tokens": [5], "first_gen_log_probs": [{5: "x"}]},
        {"first_gen_tokens": [5], "opaque_state": b""}, {"first_gen_tokens": [5], "opaque_state": b"\x00" * 1000},
        {"first_gen_tokens": [5], "opaque_state": "x"}, {"first_gen_tokens": [5], "disagg_request_id": 10**40},
        {"first_gen_tokens": [5], "opaque_state": b"\x81\xa7version\x01"},
    ],
    ids=lambda fields: repr(fields)[:60],
)  # fmt: skip
def test_disaggregated_params_of_nonsense_are_refused_alone(
    llm: LLM, expected: list[list[int]], fields: dict[str, Any]
) -> None:
    def ask() -> Any:
        params = DisaggregatedParams(request_type="generation_only", **fields)
        return answer(llm, [5, 6], made=SamplingParams(max_tokens=4, logprobs=1), disaggregated_params=params)

    assert isinstance(beside(llm, expected, ask), str)


def test_opaque_states_that_only_look_right_are_refused_alone(llm: LLM, expected: list[list[int]]) -> None:
    """Taken apart and put together again with each number of it wrong."""
    import msgspec

    context = DisaggregatedParams(request_type="context_only")
    handed = llm.generate_async(LONG_PROMPT, SamplingParams(), disaggregated_params=context).result(60)
    params = handed.outputs[0].disaggregated_params
    assert params is not None and params.opaque_state is not None
    state = msgspec.msgpack.decode(params.opaque_state)
    spoilt: list[dict[str, Any]] = [
        {"block_ids": []}, {"block_ids": [10**12] * 4}, {"block_ids": [-1] * 4}, {"num_blocks": -1},
        {"num_blocks": 2**62}, {"deadline_s": float("nan")}, {"lease_id": -1}, {"lease_id": 2**63},
        {"agent_name": ""}, {"agent_metadata": b"x"}, {"device_id": -5}, {"memory": "x"}, {"version": 2**63},
    ]  # fmt: skip
    for changes in spoilt:
        params.request_type, params.opaque_state = "generation_only", msgspec.msgpack.encode(state | changes)
        # Refused, or computed here as if the prefill side were gone: the tokens are the same.
        beside(llm, expected, lambda: answer(llm, [*LONG_PROMPT[:-1], 3], disaggregated_params=params))


# --- what TensorRT-LLM's examples do with an output ---


def test_an_output_can_be_iterated_without_a_loop(llm: LLM) -> None:
    prompt, params = NEIGHBOURS[0]
    whole = llm.generate_async(prompt, params).result(60).outputs[0]
    seen: list[int] = []
    text = ""
    for step in llm.generate_async(prompt, params, streaming=True):
        seen += step.outputs[0].token_ids_diff
        text += step.outputs[0].text_diff
    assert (seen, text) == (whole.token_ids, whole.text)
    steps = list(llm.generate_async(prompt, params))
    assert [step.outputs[0].token_ids for step in steps] == [whole.token_ids]
    assert "finished=True" in repr(steps[0]) and f"prompt_token_ids={prompt}" in repr(steps[0])


def test_an_iteration_raises_what_its_request_was_refused_for(llm: LLM) -> None:
    refused = llm.generate_async([5, 10**6], streaming=True)
    with pytest.raises(RequestError, match="token id 1000000"):
        list(refused)


def test_max_tokens_none_is_the_rest_of_the_context(llm: LLM) -> None:
    output = llm.generate_async(LONG_PROMPT, SamplingParams(max_tokens=None, ignore_eos=True)).result(60)
    assert len(output.outputs[0].token_ids) == CONTEXT - len(LONG_PROMPT)


def test_logprobs_true_is_the_likeliest_one(llm: LLM) -> None:
    flag, one = (llm.generate([5, 6], SamplingParams(max_tokens=4, logprobs=value)).outputs[0] for value in (True, 1))
    assert flag.logprobs is not None and one.logprobs is not None
    assert [list(entry) for entry in flag.logprobs] == [list(entry) for entry in one.logprobs]
    assert SamplingParams(logprobs=False).logprobs is None


async def test_text_that_cannot_be_made_ends_its_own_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted in the thread that hands out everybody's tokens: whatever fails there is one request's."""
    from trtx.torch_engine.llmapi import choices

    real = choices.StopStrings.feed

    def feed(self: Any, token_ids: Any, *, is_last: bool) -> Any:
        if "planted" in self._stops:
            raise ZeroDivisionError("planted")
        return real(self, token_ids, is_last=is_last)

    monkeypatch.setattr(choices.StopStrings, "feed", feed)
    params = SamplingParams(max_tokens=10, ignore_eos=True, stop="never said")
    good, bad = llm.generate_async([5, 6], params), llm.generate_async([5, 6], SamplingParams(stop="planted"))
    results = await asyncio.gather(good.aresult(), bad.aresult(), return_exceptions=True)
    assert isinstance(results[1], RequestFailed) and "planted" in str(results[1])
    assert len(good.outputs[0].token_ids) == 10
    assert llm._check_health()
