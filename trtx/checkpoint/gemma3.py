"""Parses what a Gemma 3 decoder has in addition to other decoders: two rotary bases, and a scale of queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trtx.checkpoint.documents import Fields
from trtx.checkpoint.rope import RopeConfig, read_rope

GEMMA3_FIELDS = frozenset((
    "hidden_activation", "query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping",
    "use_bidirectional_attention", "rope_local_base_freq", "sliding_window_pattern",
))  # fmt: skip
_ACTIVATION = "gelu_pytorch_tanh"
_GLOBAL_THETA, _LOCAL_THETA = 1e6, 1e4  # Gemma3TextConfig.default_theta in transformers 5.23
_LARGEST_SCALAR = 1 << 16


@dataclass(frozen=True, slots=True)
class Gemma3:
    """The parts of a Gemma 3 decoder that no row of ``families.py`` states."""

    query_scale: float  # queries are multiplied by it, besides head_dim ** -0.5
    local_rope: RopeConfig  # of the layers in ``is_local``; all others have the model's
    is_local: tuple[bool, ...]  # of each layer: it attends to a window, even if that covers all positions


def read_gemma3(config: Fields, *, head_dim: int, is_local: list[bool]) -> Gemma3:
    """Reads the fields of Gemma 3 as ``Gemma3TextConfig`` of transformers 5.23 does. Raises UsageError.

    ``is_local``: for each layer whether it attends to a window.
    """
    activation = config.word("hidden_activation", repr(_ACTIVATION))
    if activation != _ACTIVATION:
        config.refuse_here(
            "hidden_activation", f"{_ACTIVATION!r}: the torch engine has no other gate; use the engine tensorrt-llm"
        )
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if config.values.get(name) is not None:
            config.refuse_here(name, "null: the torch engine caps no logits; use the engine tensorrt-llm")
    if config.flag("use_bidirectional_attention", missing=False):
        config.refuse_here(
            "use_bidirectional_attention",
            "false: the torch engine attends to earlier tokens only; use another checkpoint",
        )
    scalar = config.count("query_pre_attn_scalar", most=_LARGEST_SCALAR)
    return Gemma3((head_dim / scalar) ** 0.5, _local_rope(config), tuple(is_local))


def global_rope(config: Fields, *, max_position: int) -> RopeConfig:
    """Reads the rotary embedding of the layers that attend to all positions. Raises UsageError."""
    inner = _of_layers(config, "full_attention")
    if inner is None:
        return read_rope(config, default_theta=_GLOBAL_THETA, max_position=max_position)
    if config.has("rope_scaling"):
        config.refuse("rope_scaling", "no such field beside rope_parameters: put the scaling into its full_attention")
    return read_rope(_alone(config, inner, "rope_theta"), default_theta=_GLOBAL_THETA, max_position=max_position)


def _local_rope(config: Fields) -> RopeConfig:
    name, inner = "rope_local_base_freq", _of_layers(config, "sliding_attention")
    stated = config.number(name, above=0.0) if config.has(name) else _LOCAL_THETA
    if inner is None:
        return RopeConfig(stated)
    rope = read_rope(_alone(config, inner), default_theta=stated, max_position=1)
    if rope.kind != "default":
        config.refuse_here(
            "rope_parameters", "a default rotary setting of sliding_attention; use the engine tensorrt-llm"
        )
    if config.has(name) and rope.theta != stated:
        config.refuse(name, f"{rope.theta:g} as in rope_parameters: keep the one that is meant")
    return rope


def _of_layers(config: Fields, kind: Literal["full_attention", "sliding_attention"]) -> Fields | None:
    """Returns the rotary setting of a kind of layers; None if the config has no ``rope_parameters``."""
    stated = config.inner("rope_parameters")
    if stated is None or not stated.values:
        return None
    if not stated.values.keys() <= {"full_attention", "sliding_attention"}:
        config.refuse("rope_parameters", "an object with full_attention and sliding_attention, as Gemma 3 has two")
    return stated.inner(kind) or Fields({}, config.file, f"rope_parameters.{kind}.")


def _alone(config: Fields, inner: Fields, *outer: str) -> Fields:
    """Returns a config with the rotary setting ``inner``, and with the fields ``outer`` of the whole config."""
    kept = {name: config.values[name] for name in outer if name in config.values}
    return Fields({**kept, "rope_parameters": dict(inner.values)}, config.file)
