"""Parses the rotary position embedding of a dense decoder from the two places where configs state it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from trtx.checkpoint.documents import Fields, shown
from trtx.checkpoint.families import DEFAULT_THETA, MropeSections
from trtx.errors import UsageError

# The fields of each rope type besides theta. Fields that a type does not use are refused: transformers ignores a
# "factor" without rope type "llama3" with a warning, while the author of the config expects it to scale.
_ORIGINAL = "original_max_position_embeddings"
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": (
        "factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    ),
}  # fmt: skip
# The other rope types of transformers 5.23, and why the torch engine does not support them.
_NOT_COMPUTED = {
    "dynamic": "its angles change with the length of a sequence, and cached keys keep the angles that they were given",
    "longrope": "its angles change with the length of a sequence, and cached keys keep the angles that they were given",
    "proportional": "it rotates a part of each head, and the torch engine rotates whole heads",
    "axial": "it rotates by the axes of an image, and the torch engine rotates by places in a text",
}
_OF_EVERY_TYPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_MROPE, _MROPE_FIELDS = "mrope", ("mrope_section", "mrope_interleaved")
_LARGEST_CONTEXT = 1 << 24
_ADVICE = "put the scaling with its rope_theta into rope_parameters, and delete rope_scaling"


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN's parameters besides factor and original positions. Missing fields are resolved as in transformers 5.23.

    ``attention_factor`` scales cosines and sines. Pairs with more than ``beta_fast`` rotations within the original
    positions keep their frequency, pairs with fewer than ``beta_slow`` rotations are interpolated, and a linear ramp
    connects the two; ``truncate`` rounds the ends of the ramp to whole pairs.
    """

    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The parameters of a rotary embedding.

    ``low_freq_factor`` and ``high_freq_factor`` apply only to ``llama3``, ``original_max_position`` to ``llama3`` and
    ``yarn``, ``factor`` to these two and ``linear``.

    ``mrope_section``: for a model with three positions per token (time, height, width), the number of a head's pairs
    that each position rotates; None for one position per token. The sections are consecutive or, if
    ``mrope_interleaved``, alternate: pair 0 rotates by time, 1 by height, 2 by width, 3 by time; the remaining pairs
    rotate by time.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    mrope_section: tuple[int, int, int] | None = None
    mrope_interleaved: bool = False
    yarn: Yarn | None = None

    def longest(self, max_position: int) -> int:
        """Returns the number of positions that the model supports.

        It is ``max_position`` (``max_position_embeddings``) or, if that is more, YaRN's factor times the original
        positions: the model cards of Qwen2.5 and Qwen3 add YaRN and leave ``max_position_embeddings`` unchanged. Models
        with other rope types are published with the positions after scaling.
        """
        if self.yarn is None:
            return max_position
        return max(max_position, int(self.factor * self.original_max_position))


def read_rope(
    config: Fields,
    *,
    default_theta: float,
    max_position: int,
    mrope: MropeSections | None = None,
    head_dim: int = 0,
    silent: Mapping[str, Any] | None = None,
) -> RopeConfig:
    """Reads ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` (earlier releases).

    ``default_theta``: the default of the config class. ``max_position``: ``max_position_embeddings``. ``mrope``: for a
    family with three positions per token; the sum of its sections must be half of ``head_dim``. ``silent``: the
    config class's own ``rope_parameters`` if the file has none. Raises UsageError for a missing field, for a
    contradiction between the two places, and for types and fields that the torch engine does not support.
    """
    stated = _the_one_place(config)
    if stated is None and silent is not None and not config.has("rope_parameters"):
        stated = Fields(silent, config.file, "rope_parameters.")
    kind = "default" if stated is None else _kind(stated, mrope)
    theta = _theta(config, stated, default_theta)
    _check_rotary_share(config, stated)
    rope = RopeConfig(theta) if stated is None else _scaled(config, stated, kind, theta, max_position)
    if mrope is None:
        return rope
    sections = _sections(config, stated, mrope, head_dim)
    return replace(rope, mrope_section=sections, mrope_interleaved=mrope.interleaved)


def _scaled(config: Fields, stated: Fields, kind: str, theta: float, max_position: int) -> RopeConfig:
    if kind == "linear":
        return RopeConfig(theta, "linear", stated.number("factor", above=0.0))
    if kind == "llama3":
        factor = stated.number("factor", above=0.0)
        low, high = (stated.number(name, above=0.0) for name in ("low_freq_factor", "high_freq_factor"))
        if high <= low:
            stated.refuse("high_freq_factor", f"more than low_freq_factor, {low:g}")
        original = _original_positions(config, stated)
        if original is None:
            # transformers 5 falls back to max_position_embeddings; earlier releases raise a KeyError.
            stated.refuse(_ORIGINAL, "the positions that the model was trained with before it was scaled, such as 8192")
        return RopeConfig(theta, "llama3", factor, low, high, original)
    if kind == "yarn":
        return _yarn(config, stated, theta, max_position)
    return RopeConfig(theta)


def _yarn(config: Fields, stated: Fields, theta: float, max_position: int) -> RopeConfig:
    """Parses YaRN as ``_compute_yarn_parameters`` of transformers 5.23 does."""
    if theta <= 1.0:
        (stated if stated.has("rope_theta") else config).refuse("rope_theta", "a number above 1 for rope type 'yarn'")
    original = _original_positions(config, stated) or max_position
    has_null = "factor" in stated.values and stated.values["factor"] is None
    factor = max_position / original if has_null else stated.number("factor", above=0.0)
    if factor * original > _LARGEST_CONTEXT:
        stated.refuse("factor", f"at most {_LARGEST_CONTEXT} positions in all, as {_ORIGINAL} is {original}")
    # transformers treats 0 as missing. It treats a null truncate as false, while most readers would expect true.
    fast, slow = (
        (stated.number(name, at_least=0.0) if stated.has(name) else 0.0) or silent
        for name, silent in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    if fast < slow and stated.has("beta_fast"):
        stated.refuse("beta_fast", f"at least beta_slow, {slow:g}")
    if fast < slow:
        stated.refuse("beta_slow", f"at most beta_fast, {fast:g}")
    if "truncate" in stated.values and stated.values["truncate"] is None:
        stated.refuse("truncate", "true or false, or no such field")
    scales = [stated.number(name, at_least=0.0) if stated.has(name) else 0.0 for name in ("mscale", "mscale_all_dim")]
    if stated.has("attention_factor"):
        attention = stated.number("attention_factor", above=0.0)
    elif all(scales):
        attention = _attention_factor(factor, scales[0]) / _attention_factor(factor, scales[1])
    else:
        attention = _attention_factor(factor, 1.0)
    yarn = Yarn(attention, fast, slow, stated.flag("truncate", missing=True))
    return RopeConfig(theta, "yarn", factor, original_max_position=original, yarn=yarn)


def _attention_factor(factor: float, scale: float) -> float:
    """Returns the attention factor of the YaRN paper, with its logarithmic term multiplied by ``scale``."""
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def _the_one_place(config: Fields) -> Fields | None:
    """Returns the object that states the rope type, or None; empty objects don't count.

    If both ``rope_parameters`` and ``rope_scaling`` exist, they must mean the same. Raises UsageError otherwise.
    """
    modern, legacy = (config.inner(name) for name in ("rope_parameters", "rope_scaling"))
    if modern is None or not modern.values:
        return legacy if legacy is not None and legacy.values else None
    if legacy is not None and legacy.values:
        # transformers 5.23 (RotaryEmbeddingConfigMixin.convert_rope_params_to_dict) uses rope_scaling and ignores
        # rope_parameters, even its theta; engines that read rope_parameters generate other tokens.
        outer = config.values.get("rope_theta", DEFAULT_THETA)
        if _meaning(modern.values, outer) != _meaning(legacy.values, outer):
            raise UsageError(
                f"{config.file}: rope_scaling is {shown(dict(legacy.values))} and rope_parameters is "
                f"{shown(dict(modern.values))}; expected one of them, or the same in both (transformers 5.23 takes "
                f"rope_scaling alone, with rope_theta {DEFAULT_THETA:g} where it names none): {_ADVICE}"
            )
    return modern


def _meaning(stated: Mapping[str, Any], outer_theta: object) -> dict[str, Any]:
    kind = stated.get("rope_type", stated.get("type", "default"))
    kind = "default" if kind == _MROPE else kind
    return {"rope_theta": outer_theta} | dict(stated) | {"rope_type": kind, "type": kind}


def _sections(config: Fields, stated: Fields | None, mrope: MropeSections, head_dim: int) -> tuple[int, int, int]:
    name, pairs = "mrope_section", head_dim // 2
    wanted = f"three integers of at least 1 (time, height, width) with the sum {pairs}, half of a head's size"
    found: Any = stated.values[name] if stated is not None and stated.has(name) else list(mrope.silent)
    is_right = isinstance(found, list) and len(found) == 3 and all(type(one) is int and one > 0 for one in found)
    if not is_right or sum(found) != pairs:
        silent = "" if found != list(mrope.silent) else f" (transformers takes {found} where it is missing)"
        (stated or config).refuse(name, wanted + silent)
    order = "mrope_interleaved"  # transformers ignores the field: the family decides
    if stated is not None and stated.has(order) and stated.flag(order, missing=False) != mrope.interleaved:
        stated.refuse(order, f"{str(mrope.interleaved).lower()}, as transformers computes it, or no such field")
    time, height, width = found
    return time, height, width


def _kind(stated: Fields, mrope: MropeSections | None) -> str:
    kinds = {name: stated.word(name, _one_of_types()) for name in ("rope_type", "type") if stated.has(name)}
    if mrope is not None:  # Qwen2.5-VL's files have the type "mrope"; transformers 5.23 treats it as "default"
        kinds = {name: "default" if kind == _MROPE else kind for name, kind in kinds.items()}
    for name, kind in kinds.items():
        if reason := _NOT_COMPUTED.get(kind):
            stated.refuse_here(name, f"{_one_of_types()}: the torch engine does not compute this type, as {reason}; "
                                     "use the engine tensorrt-llm")  # fmt: skip
        if kind not in _NEEDED:
            stated.refuse_here(name, f"{_one_of_types()}, the types that the torch engine computes")
    if len(set(kinds.values())) > 1:
        stated.refuse("type", f"{kinds['rope_type']!r} as in rope_type, or no such field")
    found = next(iter(kinds.values()), "default")
    _refuse_unused(stated, found, _MROPE_FIELDS if mrope is not None else ())
    return found


def _one_of_types() -> str:
    return f"one of {', '.join(_NEEDED)}"


def _refuse_unused(stated: Fields, kind: str, beside: tuple[str, ...]) -> None:
    for name, value in stated.values.items():
        if isinstance(value, Mapping):
            stated.refuse_here(name, "one rotary setting for all layers: the torch engine has no other by layer type; "
                                     "use the engine tensorrt-llm")  # fmt: skip
        if value is not None and name not in (*_OF_EVERY_TYPE, *_NEEDED[kind], *beside):
            stated.refuse(name, f"no such field for rope type {kind!r}: name the type that it belongs to, or delete it")


def _theta(config: Fields, stated: Fields | None, default: float) -> float:
    places = [place for place in (stated, config) if place is not None and place.has("rope_theta")]
    if not places:
        if "rope_theta" in config.values:
            config.refuse("rope_theta", "a number above 0, here or in rope_parameters")
        return default
    found = [place.number("rope_theta", above=0.0) for place in places]
    if len(set(found)) > 1:
        # transformers 5 reads the inner value, earlier releases the outer one.
        config.refuse("rope_theta", f"{found[0]:g} as in {places[0].name}: keep the one that is meant")
    return found[0]


def _check_rotary_share(config: Fields, stated: Fields | None) -> None:
    """Refuses partially rotated heads; transformers' Llama and Qwen apply the field only for some rope types."""
    for place in filter(None, (config, stated)):
        name = "partial_rotary_factor"
        if place.has(name) and place.number(name) != 1.0:
            place.refuse_here(name, "1: the torch engine rotates whole heads; serve it with the engine tensorrt-llm")


def _original_positions(config: Fields, stated: Fields) -> int | None:
    """Returns the original positions, or None. Raises UsageError if the two places differ.

    In transformers 5.23 the outer field wins (standardize_rope_params, which the model calls again).
    """
    places = [place for place in (stated, config) if place.has(_ORIGINAL)]
    found = [place.count(_ORIGINAL, most=_LARGEST_CONTEXT) for place in places]
    if len(set(found)) > 1:
        config.refuse(_ORIGINAL, f"{found[0]} as in {stated.name}: keep the one that is meant")
    return found[0] if found else None
