"""Parses sliding-window layers from ``config.json``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtx.checkpoint.documents import Fields

if TYPE_CHECKING:
    from trtx.checkpoint.families import Family

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ELSEWHERE = "the torch engine computes full attention alone there; serve it with the engine tensorrt-llm"

Windows = tuple[int | None, ...]
"""For each layer the number of positions that a query attends to, including its own; None: all. Empty if no layer has a
window."""


def read_windows(config: Fields, family: Family, num_layers: int, max_position: int) -> Windows:
    """Returns the window of each layer.

    As in transformers, ``layer_types`` decides which layers slide; without it, ``max_window_layers`` does. A window in
    a family without windows counts as intended unless ``use_sliding_window`` is false, and is refused. A window that
    covers all positions counts as none.
    """
    slides = _listed(config, family, num_layers)
    missing = family.window not in ("switched", "whole")
    is_always = family.window in ("always", "alternating", "patterned")
    is_on = config.flag("use_sliding_window", missing=missing) or is_always
    window = config.values.get("sliding_window") if is_on else None
    if window is None:
        if slides is not None and any(slides):
            config.refuse("layer_types", f"{_FULL!r} throughout, or a sliding_window that is switched on")
        if slides is None and family.window in ("alternating", "patterned"):
            config.refuse("sliding_window", f"a number of positions, or layer_types of {_FULL!r} throughout")
        return ()
    if slides is None:
        slides = _derived(config, family, num_layers)
    if not any(slides):
        return ()
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        config.refuse("sliding_window", "a whole number of positions, at least 1, or null")
    if window >= max_position:
        return ()
    if family.window == "unknown":
        config.refuse_here(
            "sliding_window", f"null, or use_sliding_window false, in a {family.model_type}: {_ELSEWHERE}"
        )
    return tuple(window if is_sliding else None for is_sliding in slides)


def _listed(config: Fields, family: Family, num_layers: int) -> list[bool] | None:
    """Returns for each layer whether ``layer_types`` makes it slide; None if there is no such field."""
    if "layer_types" in config.values and family.window == "always":
        # transformers 5.23 (AutoConfig.from_pretrained) loads a mistral with this field, null or not, as a ministral.
        config.refuse("layer_types", f"no such field in a {family.model_type}: transformers takes it for another model")
    kinds = config.values.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        config.refuse("layer_types", f"a list of {num_layers} names, one a layer")
    if family.window == "unknown" and any(kind != _FULL for kind in kinds):
        config.refuse_here("layer_types", f"{_FULL!r} throughout in a {family.model_type}: {_ELSEWHERE}")
    if family.window == "whole":
        if any(kind != _FULL for kind in kinds):
            config.refuse("layer_types", f"{_FULL!r} throughout in a {family.model_type}, which has one window for all")
        return None
    if any(kind not in (_FULL, _SLIDING) for kind in kinds):
        config.refuse("layer_types", f"{_FULL!r} or {_SLIDING!r} of every layer")
    return [kind == _SLIDING for kind in kinds]


def sliding_layers(config: Fields, family: Family, num_layers: int) -> list[bool]:
    """Returns for each layer of a family that always has windows whether it slides, whatever the window's size."""
    return _listed(config, family, num_layers) or _derived(config, family, num_layers)


def _derived(config: Fields, family: Family, num_layers: int) -> list[bool]:
    if family.window == "patterned":
        pattern = config.count("sliding_window_pattern", most=1 << 12)
        return [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    if family.window == "alternating":
        return [layer % 2 == 0 for layer in range(num_layers)]
    first = 0
    if family.window == "switched":
        stated = config.values.get("max_window_layers")
        if isinstance(stated, bool) or not isinstance(stated, int):
            config.refuse("max_window_layers", "a whole number of layers")
        first = stated
    return [layer >= first for layer in range(num_layers)]


def refuse_nested_windows(text: Fields, windows: Windows) -> None:
    """Refuses windows in the decoder of a multimodal model; they were never compared with another engine."""
    if windows and text.has("layer_types"):
        text.refuse_here("layer_types", f"{_FULL!r} throughout: {_ELSEWHERE}")
    if windows:
        text.refuse_here("sliding_window", f"null, or use_sliding_window false: {_ELSEWHERE}")
