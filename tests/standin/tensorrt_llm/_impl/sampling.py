"""``SamplingParams`` and its kin: the checks of the real classes, and what of them the torch engine is asked for."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import fields, replace
from typing import Any

from tensorrt_llm._facts import dataclass, enumeration
from tensorrt_llm._standin import absent

LogprobMode = enumeration("LogprobMode")

# Handled by the stand-in itself, as the real LLM handles them outside its engine.
_NOT_HANDED_ON = ("stop", "pad_id")


def _check_guide(self: Any) -> None:
    guides = [field.name for field in fields(self) if getattr(self, field.name)]
    if len(guides) > 1:
        raise ValueError(f"Only one guide can be used for a request, but got {len(guides)}.")


GuidedDecodingParams = dataclass("GuidedDecodingParams", {"_validate": _check_guide})


def _prepare(self: Any) -> None:
    if self.pad_id is None:
        self.pad_id = self.end_id
    self.best_of = self.best_of or self.n
    if self.top_p is not None and not 0 <= self.top_p <= 1:
        raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
    if self.top_k is not None and self.top_k < 0:
        raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
    if self.temperature is not None and self.temperature < 0:
        raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")
    if self.best_of < self.n:
        raise ValueError(f"best_of ({self.best_of}) cannot be less than n ({self.n})")
    if self.best_of > 1 and _is_greedy(self) and not os.environ.get("TLLM_ALLOW_N_GREEDY_DECODING"):
        raise ValueError(f"Greedy decoding in the LLM API does not allow multiple returns, got best_of={self.best_of}")
    if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
        raise ValueError(f"truncate_prompt_tokens must be >= 1, got {self.truncate_prompt_tokens}")
    if self.guided_decoding is not None:
        self.guided_decoding._validate()


def _is_greedy(params: Any) -> bool:
    if params.use_beam_search:
        return False
    nothing_set = params.temperature is None and params.top_p is None and params.top_k is None
    return nothing_set or params.top_k == 1 or params.top_p == 0 or params.temperature == 0


SamplingParams = dataclass("SamplingParams", {"__post_init__": _prepare})


class LogitsProcessor(ABC):
    """Called before each token of a request that carries it is sampled."""

    @abstractmethod
    def __call__(self, req_id: int, logits: Any, token_ids: list[list[int]], stream_ptr: Any, client_id: Any) -> None:
        """``logits`` is edited in place."""


LogitsProcessor.__module__ = "tensorrt_llm.sampling_params"


def stop_strings(params: Any) -> list[str]:
    return [params.stop] if isinstance(params.stop, str) else list(params.stop or ())


def for_torch_engine(params: Any, *, max_tokens: int) -> Any:
    """The torch engine's ``SamplingParams`` for one request; NotImplementedError for what it would not honour."""
    from trtx.torch_engine.llmapi.sampling import FIELDS, FieldUse
    from trtx.torch_engine.llmapi.sampling import SamplingParams as TorchSamplingParams

    asked = {f.name: getattr(params, f.name) for f in fields(params) if getattr(params, f.name) != f.default}
    for name, known in FIELDS.items():
        if known.torch is FieldUse.REFUSED and name in asked and name not in _NOT_HANDED_ON:
            raise absent(f"SamplingParams.{name}")
    if params.apply_batched_logits_processor:
        raise absent("SamplingParams.apply_batched_logits_processor")  # the real PyTorch backend has no such hook
    asked = {name: value for name, value in asked.items() if not name.startswith("_") and name not in _NOT_HANDED_ON}
    asked["max_tokens"] = max_tokens
    for name in ("logprobs", "prompt_logprobs"):
        if isinstance(asked.get(name), bool):  # the real executor asks for truth, then takes the number: True is 1
            asked[name] = 1 if asked[name] else None
    if params.ignore_eos:
        asked.pop("stop_token_ids", None)  # the real engine is given no stop words at all then
    if params.min_tokens is not None:
        asked["min_tokens"] = min(params.min_tokens, max_tokens)
    return TorchSamplingParams(**asked)


__all__ = ["GuidedDecodingParams", "LogitsProcessor", "LogprobMode", "SamplingParams", "replace"]
