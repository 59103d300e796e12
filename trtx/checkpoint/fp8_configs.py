"""Reads the ``quantization_config`` of FP8 checkpoints that ModelOpt did not export.

Two exporters are known: ``fp8``, the block scales that DeepSeek introduced and Qwen publishes, as transformers 5.23
reads them (``FineGrainedFP8Config``), and ``compressed-tensors`` 0.20, which llm-compressor writes and Red Hat
publishes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from trtx.checkpoint.documents import Fields
from trtx.checkpoint.formats import FP8_BLOCK

FINE_GRAINED, COMPRESSED = "fp8", "compressed-tensors"
BLOCKS, PER_CHANNEL, PER_TENSOR = "FP8_BLOCK_SCALES", "FP8_PER_CHANNEL_PER_TOKEN", "FP8"
REGEX = "re:"
"""The prefix by which compressed-tensors marks a name as a regular expression."""

_IGNORED = ("modules_to_not_convert", "ignored_layers")
# A field, and the values of it that the torch engine computes; None: missing or null, too.
_FINE_GRAINED: Mapping[str, tuple[Any, ...]] = {
    "weight_block_size": ([FP8_BLOCK, FP8_BLOCK],),
    "activation_scheme": ("dynamic", None),
    "fmt": ("e4m3", None),
    "scale_fmt": ("float", None),
    "expert_dtype": ("fp8", None),
    "dequantize": (False, None),
    "modules_to_convert": (None, []),
}
_COMPRESSED: Mapping[str, tuple[Any, ...]] = {
    "format": ("float-quantized", "naive-quantized"),
    "quantization_status": ("compressed", "frozen", None),
    "kv_cache_scheme": (None,),
    "moe_sparsity_config": (None,),
    "transform_config": (None, {}),
}
_UNREAD = ("config_groups", "ignore", "sparsity_config", "quant_method", "version", "global_compression_ratio")
_GROUP: Mapping[str, tuple[Any, ...]] = {
    "targets": (["Linear"],),
    "output_activations": (None,),
    "format": (None, "float-quantized", "naive-quantized"),
}
_ARGS: Mapping[str, tuple[Any, ...]] = {
    "num_bits": (8,), "type": ("float",), "symmetric": (True,), "actorder": (None,), "scale_dtype": (None,),
}  # fmt: skip
_WITHOUT_EFFECT = ("observer", "observer_kwargs", "zp_dtype")  # how scales were found; zero points of symmetric weights
# The strategies of weights and of their inputs, whether the inputs' scales are dynamic, and the algorithm of both.
_STRATEGIES: Mapping[tuple[Any, Any, Any], str] = {
    ("tensor", "tensor", False): PER_TENSOR,
    ("channel", "token", True): PER_CHANNEL,
    ("block", "group", True): BLOCKS,
}


def algorithm_of(method: str, stated: Mapping[str, Any]) -> str | None:
    """Returns the algorithm that a ``quantization_config`` names; None for any other method or format.

    It looks only at what decides the tensors and raises nothing: see :func:`check_fp8_config`.
    """
    if method == FINE_GRAINED:
        return BLOCKS if stated.get("weight_block_size") is not None else None
    groups = stated.get("config_groups")
    if method != COMPRESSED or not isinstance(groups, Mapping) or len(groups) != 1:
        return None
    weights, inputs = (_args(group, name) for group in groups.values() for name in ("weights", "input_activations"))
    if weights.get("num_bits") != 8 or weights.get("type") != "float":
        return None
    found = (weights.get("strategy"), inputs.get("strategy"), inputs.get("dynamic"))
    return _STRATEGIES.get(found) if all(isinstance(value, (str, bool)) for value in found) else None


def _args(group: object, name: str) -> Mapping[str, Any]:
    found = group.get(name) if isinstance(group, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def excluded_field(method: str, stated: Mapping[str, Any]) -> str | None:
    """Returns the field of a ``quantization_config`` that lists excluded modules; None for any other method."""
    if method == COMPRESSED:
        return "ignore"
    if method == FINE_GRAINED:  # transformers looks at the second name only if the first is missing or null
        return next((name for name in _IGNORED if stated.get(name) is not None), _IGNORED[0])
    return None


def check_fp8_config(method: str, fields: Fields) -> None:
    """Raises UsageError, which names the field, unless the torch engine computes all that ``fields`` ask for.

    ``fields``: a ``quantization_config`` for which :func:`algorithm_of` returns an algorithm.
    """
    if method == FINE_GRAINED:
        _check(fields, _FINE_GRAINED, unread=("quant_method", *_IGNORED))
    else:
        _check_compressed(fields)
    excluded = str(excluded_field(method, fields.values))
    for pattern in fields.values.get(excluded) or ():
        if method == FINE_GRAINED or pattern.startswith(REGEX):
            try:
                re.compile(pattern.removeprefix(REGEX))
            except re.error:
                fields.refuse(excluded, f"regular expressions, which {pattern!r:.60} is not")


def _check_compressed(fields: Fields) -> None:
    _check(fields, _COMPRESSED, unread=_UNREAD)
    sparsity = fields.inner("sparsity_config")
    if sparsity is not None and sparsity.values.get("format", "dense") != "dense":
        _refuse(sparsity, "format", "'dense'")
    groups = fields.inner("config_groups")
    group = groups and groups.inner(next(iter(groups.values)))
    assert group is not None  # algorithm_of read its weights and their inputs
    _check(group, _GROUP, unread=("weights", "input_activations"))
    weights, inputs = group.inner("weights"), group.inner("input_activations")
    assert weights is not None and inputs is not None
    is_blocked = weights.values["strategy"] == "block"
    _check_args(weights, dynamic=(False, None), block=[FP8_BLOCK, FP8_BLOCK] if is_blocked else None, group=None)
    _check_args(inputs, dynamic=(True, False), block=None, group=FP8_BLOCK if is_blocked else None)


def _check_args(fields: Fields, *, dynamic: tuple[Any, ...], block: list[int] | None, group: int | None) -> None:
    own = {"dynamic": dynamic, "block_structure": (block,), "group_size": (group,)}
    _check(fields, {**_ARGS, **own}, unread=("strategy", *_WITHOUT_EFFECT))


def _check(fields: Fields, known: Mapping[str, tuple[Any, ...]], *, unread: tuple[str, ...]) -> None:
    for name, allowed in known.items():
        value = fields.values.get(name)
        if not any(value == one and type(value) is type(one) for one in allowed):
            shown = [str(one) if isinstance(one, (list, dict)) else repr(one) for one in allowed if one is not None]
            _refuse(fields, name, " or ".join(shown) or "no such field")
    for name, value in fields.values.items():
        if name not in known and name not in unread and value not in (None, False, [], {}):
            _refuse(fields, name, "no such field")


def _refuse(fields: Fields, name: str, expected: str) -> NoReturn:
    fields.refuse_here(name, f"{expected}: the torch engine computes nothing else; use the engine tensorrt-llm")
