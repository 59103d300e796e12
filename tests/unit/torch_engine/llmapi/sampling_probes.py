"""What shows of a field of ``SamplingParams`` that an engine does with it what the table says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trtx.torch_engine.llmapi.guided_decoding import GuidedDecodingParams
from trtx.torch_engine.llmapi.sampling import FieldUse

TABLE, PROBES = "trtx/torch_engine/llmapi/sampling.py", "tests/unit/torch_engine/llmapi/sampling_probes.py"
# Every other field of TensorRT-LLM's changes answers there: it is honoured or refused.
WITHOUT_EFFECT: dict[str, Any] = {
    "pad_id": 7,  # nothing is padded
    "length_penalty": 2.0,  # of beam search, which is refused
    "early_stopping": 1,  # of beam search, which is refused
    "return_perf_metrics": True,  # they are always there
    "spaces_between_special_tokens": False,  # fast tokenizers have no such switch
}
COMMON: dict[str, Any] = {"max_tokens": 8, "end_id": -1}
_DRAWN = {"temperature": 3.0, "seed": 1}


def without_the_likeliest(req_id: int, logits: Any, token_ids: Any, stream_ptr: Any, client_id: Any) -> None:
    """A logits processor."""
    logits[..., logits.argmax()] = float("-inf")


def batched_without_the_likeliest(
    req_ids: list[int], logits: list[Any], token_ids: Any, stream_ptr: Any, client_ids: Any
) -> None:
    """A batched logits processor."""
    for request, row in zip(req_ids, logits, strict=True):
        without_the_likeliest(request, row, None, None, None)


def probes(whole: Any) -> dict[str, tuple[dict[str, Any], Any]]:
    """By field: what is asked beside it, and a value with which the answer must be another. ``whole``: COMMON's."""
    third, text = whole.token_ids[2], whole.text[3:6]
    return {
        "end_id": ({}, third),
        "max_tokens": ({}, 5),
        "min_tokens": ({"end_id": third}, 7),
        "stop": ({}, text),
        "stop_token_ids": ({}, [third]),
        "include_stop_str_in_output": ({"stop": text}, True),
        "ignore_eos": ({"end_id": third}, True),
        "truncate_prompt_tokens": ({}, 2),
        "temperature": ({"seed": 1}, 3.0),
        "top_k": (_DRAWN, 2),
        "top_p": (_DRAWN, 0.1),
        "min_p": (_DRAWN, 0.9),
        "seed": (_DRAWN, 2),
        "repetition_penalty": ({}, 50.0),
        "presence_penalty": ({}, 100.0),
        "frequency_penalty": ({}, 100.0),
        "n": (_DRAWN, 2),
        "best_of": (_DRAWN, 8),
        "logits_processor": ({}, without_the_likeliest),
        "apply_batched_logits_processor": ({}, True),  # an LLM needs batched_without_the_likeliest for it
        "logprobs": ({}, 2),
        "prompt_logprobs": ({}, 2),
        "detokenize": ({}, False),
        "add_special_tokens": ({}, False),
        "skip_special_tokens": ({}, False),
        "guided_decoding": ({}, GuidedDecodingParams(regex="[0-9]{20}")),
    }


def wanted(ids: list[int]) -> dict[str, list[tuple[dict[str, Any], Any, list[int]]]]:
    """By field: what is asked beside it, its value, and the tokens that come of ``ids``, COMMON's own."""
    third = ids[2]
    upto_third = ids[: ids.index(third)]
    others = [token for token in range(300) if token not in ids]  # more than any table of stop ids has room for
    return {
        "max_tokens": [({}, count, ids[:count]) for count in (1, 3, 7)],
        "end_id": [({}, third, [*upto_third, third]), ({}, others[0], ids)],
        "stop_token_ids": [({}, [*others[:64], third], upto_third), ({}, others, ids), ({}, [], ids)],
        "ignore_eos": [({"end_id": third}, True, ids)],
        "temperature": [({"seed": 1}, 0.0, ids)],
        "top_k": [(_DRAWN, 1, ids)],
        "top_p": [(_DRAWN, 0.0, ids)],
    }


def said(output: Any) -> list[Any]:
    """All that a client sees of an answer that a parameter may change."""
    return [
        (c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs, c.prompt_logprobs) for c in output.outputs
    ]


def check(name: str, use: FieldUse, answer: Callable[..., Any]) -> None:
    """``answer`` takes keyword arguments of ``SamplingParams``, and returns a finished output."""
    whole = answer(**COMMON).outputs[0]
    assert len(whole.token_ids) == COMMON["max_tokens"], f"{COMMON} gives {whole.token_ids}: max_tokens is cut short"
    known = {**probes(whole), **{name: ({}, value) for name, value in WITHOUT_EFFECT.items()}}
    assert name in known, (
        f"{TABLE} calls {name} {use.value}, and nothing shows that it is: add a probe for it to {PROBES}, or let the "
        "table refuse it"
    )
    beside, value = known[name]
    asked = COMMON | beside
    if use is FieldUse.REFUSED:
        with pytest.raises(ValueError, match=f"SamplingParams.{name} is .*; expected "):
            answer(**asked, **{name: value})
        return
    changes = said(answer(**asked)) != said(answer(**{**asked, name: value}))
    assert changes is (use is FieldUse.HONOURED), (
        f"{TABLE} calls {name} {use.value}, and {name}={value!r} beside {asked} "
        + ("changes the answer: call it honoured" if changes else "changes nothing: implement it, or refuse it")
        + f"; if the value is one without an effect, choose another one in probes of {PROBES}"
    )
    if use is FieldUse.HONOURED:
        for beside, value, tokens in wanted(list(whole.token_ids)).get(name, []):
            found = list(answer(**{**COMMON, **beside, name: value}).outputs[0].token_ids)
            assert found == tokens, (
                f"{name}={value!r} beside {beside} gives {found}, expected {tokens}: resolve_sampling of {TABLE} hands "
                "on another value, or the engine cuts it short"
            )
