"""Speculative decoding and sparse attention as arguments: the classes, their fields and the checks of the real ones.

An ``LLM`` that is given one says that only the real package does it (``args.resolve``); what the class itself refuses
is refused first, as there.
"""

from __future__ import annotations

import ast
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, Field, field_validator, model_validator

from tensorrt_llm._impl import args as llm_args

# Class -> its decoding_type, and the entry of llm_args.json that has its fields.
_DECODING = {
    "EagleDecodingConfig": ("Eagle", "Eagle3"),
    "Eagle3DecodingConfig": ("Eagle3", "Eagle3"),
    "MTPDecodingConfig": ("MTP", "MTP"),
    "NGramDecodingConfig": ("NGram", "NGram"),
    "DraftTargetDecodingConfig": ("Draft_Target", "Draft_Target"),
    "UserProvidedDecodingConfig": ("User_Provided", "User_Provided"),
    "AutoDecodingConfig": ("AUTO", "AUTO"),
    "LookaheadDecodingConfig": ("Lookahead", "Lookahead"),
    "MedusaDecodingConfig": ("Medusa", "Medusa"),
    "SaveHiddenStatesDecodingConfig": ("SaveState", "SaveState"),
    "PARDDecodingConfig": ("PARD", "PARD"),
    "SADecodingConfig": ("SA", "SA"),
    "DFlashDecodingConfig": ("DFlash", "DFlash"),
}
_SPARSE = {
    "RocketSparseAttentionConfig": "rocket",
    "DeepSeekSparseAttentionConfig": "dsa",
    "SkipSoftmaxAttentionConfig": "skip_softmax",
}
_WITH_ENHANCER = ("Eagle3DecodingConfig", "MTPDecodingConfig", "PARDDecodingConfig")
_NEEDS_LENGTH = {"Eagle": "Eagle", "Eagle3": "Eagle", "NGram": "NGram", "SA": "SA", "Draft_Target": "DraftTarget"}
_NEEDS_MODEL = {
    "Eagle": "Draft model must be provided for EAGLE",
    "Eagle3": "Draft model must be provided for EAGLE",
    "Draft_Target": "speculative_model must be specified for DraftTarget",
}
_OLDEST = "1.2.1"


def __getattr__(name: str) -> Any:
    if name in _DECODING:
        return decoding(name)
    if name in _SPARSE:
        return sparse(name)
    if name == "SAEnhancerConfig":
        return llm_args.model(name)
    raise AttributeError(name)


def union() -> Any:
    """Every decoding configuration that the version has, told apart by ``decoding_type``."""
    kinds = [decoding(name) for name in _DECODING if _has(name)]
    return Annotated[reduce(or_, kinds), Field(discriminator="decoding_type")]


def _has(name: str) -> bool:
    facts = llm_args._facts()["speculative_config"]
    return _DECODING[name][0] in facts["types_in"].get(llm_args.COLUMN, facts["types_in"]["main-2026-07"])


@cache
def decoding(name: str) -> type[BaseModel]:
    kind, entry = _DECODING[name]
    types = llm_args._facts()["speculative_config"]["types"]
    is_oldest = llm_args.COLUMN == _OLDEST
    fields = llm_args.known_fields(types["DecodingBaseConfig"]["fields"]) | llm_args.known_fields(
        types[entry].get("fields", [])
    )
    if not is_oldest:
        fields.pop("speculative_model_dir")  # another name of speculative_model by now
    fields.pop("sa_config", None)
    if name in _WITH_ENHANCER and llm_args.COLUMN == "main-2026-07":
        fields["sa_config"] = (llm_args.model("SAEnhancerConfig") | None, None)
    fields["decoding_type"] = (Literal[kind], kind)
    checks: Any = {"check_lengths": model_validator(mode="after")(_check)}
    if not is_oldest:
        checks["rename"] = model_validator(mode="before")(_rename)
    if "eagle_choices" in fields:
        checks["read_choices"] = field_validator("eagle_choices", mode="before")(_read_choices)
    base = llm_args.StrictBaseModel
    return pydantic.create_model(name, __base__=base, __module__=llm_args.HOME, __validators__=checks, **fields)


@cache
def sparse(name: str) -> type[BaseModel]:
    facts, algorithm = llm_args._facts()["sparse_attention_config"], _SPARSE[name]
    rows = [*facts["base_fields"], *facts["algorithms"][algorithm]["fields"]]
    fields: Any = {**llm_args.known_fields(rows), "algorithm": (Literal[algorithm], algorithm)}
    return pydantic.create_model(name, __base__=llm_args.StrictBaseModel, __module__=llm_args.HOME, **fields)


def _rename(given: Any) -> Any:
    """Older names; of ``num_nextn_predict_layers`` and ``max_draft_len`` the latter wins, as there."""
    if not isinstance(given, dict):
        return given
    given = dict(given)
    if "speculative_model" not in given and "speculative_model_dir" in given:
        given["speculative_model"] = given.pop("speculative_model_dir")
    if "num_nextn_predict_layers" in given and given.get("decoding_type", "MTP") == "MTP":
        layers = given.pop("num_nextn_predict_layers")
        given.setdefault("max_draft_len", layers)
    return given


def _read_choices(given: Any) -> Any:
    return ast.literal_eval(given.replace(" ", "")) if isinstance(given, str) else given


def _check(self: Any) -> Any:
    kind = self.decoding_type
    if kind in _NEEDS_LENGTH and not self.max_draft_len:
        raise ValueError(f"max_draft_len must be > 0 for {_NEEDS_LENGTH[kind]}")
    if kind == "MTP" and self.max_draft_len is not None and self.max_draft_len <= 0:
        raise ValueError("max_draft_len must be > 0 for MTP")
    named = getattr(self, "speculative_model", None) or getattr(self, "speculative_model_dir", None)
    if kind in _NEEDS_MODEL and named is None:
        raise ValueError(_NEEDS_MODEL[kind])
    if self.max_concurrency is not None and getattr(self, "draft_len_schedule", None) is not None:
        raise ValueError("max_concurrency and draft_len_schedule are mutually exclusive.")
    if getattr(self, "max_total_draft_tokens", ...) is None:
        self.max_total_draft_tokens = 1 if kind == "SaveState" else self.max_draft_len
    return self
