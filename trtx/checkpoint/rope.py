"""Rotary positions of a dense decoder: one reading of the two places where configs have stated them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtx.checkpoint.class_defaults import DEFAULT_THETA
from trtx.checkpoint.documents import Fields, shown
from trtx.errors import UsageError

# By rope type what it needs beside theta. What a type does not use is refused: a "factor" without its "llama3" is a
# scaling that somebody believes in, and transformers ignores it with a warning.
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_OF_EVERY_TYPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_MROPE, _MROPE_FIELDS = "mrope", ("mrope_section", "mrope_interleaved")
_LARGEST_CONTEXT = 1 << 24
_ADVICE = "put the scaling with its rope_theta into rope_parameters, and delete rope_scaling"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The last three fields of the scaling hold for ``llama3`` alone, ``factor`` for ``linear`` too.

    ``mrope_section``: of a model that gives a token three positions (time, height, width), how many of a head's pairs
    turn by each; None where there is one. They follow each other, or take turns where they are ``mrope_interleaved``:
    pair 0 by time, 1 by height, 2 by width, 3 by time, and time turns those that are left.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    mrope_section: tuple[int, int, int] | None = None
    mrope_interleaved: bool = False


@dataclass(frozen=True, slots=True)
class Mrope:
    """Of a family with three positions a token. ``silent``: transformers' sections where the file has none."""

    silent: tuple[int, int, int]
    interleaved: bool


def read_rope(config: Fields, *, default_theta: float, mrope: Mrope | None = None, head_dim: int = 0) -> RopeConfig:
    """From ``rope_parameters`` (transformers 5), or ``rope_theta`` beside ``rope_scaling`` (before it).

    ``default_theta``: of the config class, where the file has none. ``mrope``: of a family with three positions, whose
    sections have to fill ``head_dim``. Raises UsageError for what is missing, for two places that say different things,
    and for types and fields that the torch engine does not compute.
    """
    stated = _the_one_place(config)
    kind = "default" if stated is None else _kind(stated, mrope)
    theta = _theta(config, stated, default_theta)
    _check_rotary_share(config, stated)
    if mrope is not None:
        if stated is not None and kind != "default":
            stated.refuse_here("rope_type", "'default': the torch engine scales no positions of three parts; use "
                                            "the engine tensorrt-llm")  # fmt: skip
        sections = _sections(config, stated, mrope, head_dim)
        return RopeConfig(theta, mrope_section=sections, mrope_interleaved=mrope.interleaved)
    if stated is None or kind == "default":
        return RopeConfig(theta)
    factor = stated.number("factor", above=0.0)
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    low, high = (stated.number(name, above=0.0) for name in ("low_freq_factor", "high_freq_factor"))
    if high <= low:
        stated.refuse("high_freq_factor", f"more than low_freq_factor, {low:g}")
    return RopeConfig(theta, kind, factor, low, high, _original_positions(config, stated))


def _the_one_place(config: Fields) -> Fields | None:
    """The object that states the type, empty ones aside. Two that mean the same are one."""
    modern, legacy = (config.inner(name) for name in ("rope_parameters", "rope_scaling"))
    if modern is None or not modern.values:
        return legacy if legacy is not None and legacy.values else None
    if legacy is not None and legacy.values:
        # transformers 5.23 (RotaryEmbeddingConfigMixin.convert_rope_params_to_dict) takes rope_scaling, and of
        # rope_parameters not even the theta; engines that read rope_parameters serve other tokens.
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


def _sections(config: Fields, stated: Fields | None, mrope: Mrope, head_dim: int) -> tuple[int, int, int]:
    name, pairs = "mrope_section", head_dim // 2
    wanted = f"three integers of at least 1 (time, height, width) with the sum {pairs}, half of a head's size"
    found: Any = stated.values[name] if stated is not None and stated.has(name) else list(mrope.silent)
    is_right = isinstance(found, list) and len(found) == 3 and all(type(one) is int and one > 0 for one in found)
    if not is_right or sum(found) != pairs:
        silent = "" if found != list(mrope.silent) else f" (transformers takes {found} where it is missing)"
        (stated or config).refuse(name, wanted + silent)
    order = "mrope_interleaved"  # which transformers doesn't look at: the family decides
    if stated is not None and stated.has(order) and stated.flag(order, missing=False) != mrope.interleaved:
        stated.refuse(order, f"{str(mrope.interleaved).lower()}, as transformers computes it, or no such field")
    time, height, width = found
    return time, height, width


def _kind(stated: Fields, mrope: Mrope | None) -> str:
    kinds = {name: stated.word(name, _one_of_types()) for name in ("rope_type", "type") if stated.has(name)}
    if mrope is not None:  # Qwen2.5-VL's files call it a type; to transformers 5.23 it is the default one with sections
        kinds = {name: "default" if kind == _MROPE else kind for name, kind in kinds.items()}
    for name, kind in kinds.items():
        if kind not in _NEEDED:
            stated.refuse_here(name, f"{_one_of_types()}; other rope types are not supported by the torch engine: use "
                                "the engine tensorrt-llm")  # fmt: skip
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
        # transformers 5 reads the inner one, releases before it the outer one.
        config.refuse("rope_theta", f"{found[0]:g} as in {places[0].name}: keep the one that is meant")
    return found[0]


def _check_rotary_share(config: Fields, stated: Fields | None) -> None:
    """Heads that are rotated in part: transformers' Llama and Qwen follow the field for some rope types alone."""
    for place in filter(None, (config, stated)):
        name = "partial_rotary_factor"
        if place.has(name) and place.number(name) != 1.0:
            place.refuse_here(name, "1: the torch engine rotates whole heads; serve it with the engine tensorrt-llm")


def _original_positions(config: Fields, stated: Fields) -> int:
    """Of llama3. transformers 5.23 lets the outer field win (standardize_rope_params, called again by the model)."""
    name = "original_max_position_embeddings"
    places = [place for place in (stated, config) if place.has(name)]
    if not places:
        # transformers 5 falls back to max_position_embeddings, releases before it end with a KeyError.
        stated.refuse(name, "the positions that the model was trained with before it was scaled, such as 8192")
    found = [place.count(name, most=_LARGEST_CONTEXT) for place in places]
    if len(set(found)) > 1:
        config.refuse(name, f"{found[0]} as in {stated.name}: keep the one that is meant")
    return found[0]
