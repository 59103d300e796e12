"""The defaults of transformers' config classes for fields that are missing in a ``config.json``.

Published files omit values that equal the default of their class: the decoder of LLaVA 1.5 states no size at all.
Importing transformers takes seconds, so the defaults are copied here, and in ``families.py`` for the decoders that the
torch engine supports.
``tests/unit/checkpoint/test_class_defaults.py`` compares them with the installed classes (5.23).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from trtx.checkpoint.families import FAMILIES, NESTED_FAMILIES, NO_BIAS, UNTIED, decoder_defaults

_TEXT, _TYPE = "text_config", "model_type"


@dataclass(frozen=True, slots=True)
class NestedClass:
    """The class of a nested config.

    ``model_type``: the class if the object has no ``model_type``. ``empty``: the fields of a missing object, as far as
    they differ from the defaults of the class. ``is_fixed``: transformers uses this class for any ``model_type``.
    """

    model_type: str
    empty: Mapping[str, Any] = field(default_factory=dict)
    is_fixed: bool = False


@dataclass(frozen=True, slots=True)
class ConfigClass:
    """The defaults of one config class.

    ``aliases``: alternative names of fields. ``is_flat``: if there is no ``text_config``, the decoder's fields are in
    the same object as the wrapper's.
    """

    fields: Mapping[str, Any]
    nested: Mapping[str, NestedClass] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    is_flat: bool = False


_GELU = "gelu_pytorch_tanh"
_TIED = {"tie_word_embeddings": True}
_QWEN_IDS = {
    "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
}  # fmt: skip
_QWEN_TOWER = {"num_heads": 16, "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2,
               "out_hidden_size": 3584}  # fmt: skip
_QWEN_ALIASES = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}


def _qwen_wrapper(model_type: str, *, is_flat: bool = False) -> ConfigClass:
    nested = {name: NestedClass(f"{model_type}_{part}", is_fixed=True)
              for name, part in ((_TEXT, "text"), ("vision_config", "vision"))}  # fmt: skip
    return ConfigClass(_QWEN_IDS | UNTIED, nested=nested, is_flat=is_flat)


CLASSES: Mapping[str, ConfigClass] = MappingProxyType({
    **{
        family.model_type: ConfigClass(family.defaults, aliases=family.aliases)
        for family in (*FAMILIES.values(), *NESTED_FAMILIES.values())
    },
    "gemma": ConfigClass(decoder_defaults(
        256000, 3072, 24576, 28, 16, 8192, num_key_value_heads=16, head_dim=256, hidden_act=_GELU, **_TIED, **NO_BIAS,
    )),
    "gemma2": ConfigClass(decoder_defaults(
        256000, 2304, 9216, 26, 8, 8192, num_key_value_heads=4, head_dim=256, hidden_activation=_GELU,
        sliding_window=4096, query_pre_attn_scalar=256, final_logit_softcapping=30.0, attn_logit_softcapping=50.0,
        **_TIED, **NO_BIAS,
    )),
    "gemma3": ConfigClass(
        {"mm_tokens_per_image": 256, "boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144,
         **_TIED},
        nested={_TEXT: NestedClass("gemma3_text", is_fixed=True),
                "vision_config": NestedClass("siglip_vision_model")},
        aliases={"image_token_id": "image_token_index", "boi_token_id": "boi_token_index",
                 "eoi_token_id": "eoi_token_index"},
    ),
    "llava": ConfigClass(
        {"image_token_index": 32000, "image_seq_length": 576, "projector_hidden_act": "gelu",
         "vision_feature_select_strategy": "default", "vision_feature_layer": -2, "multimodal_projector_bias": True,
         **UNTIED},
        nested={
            _TEXT: NestedClass("llama"),
            "vision_config": NestedClass("clip_vision_model", {
                "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
                "image_size": 336, "patch_size": 14, "projection_dim": 768, "vocab_size": 32000,
            }),
        },
        aliases={"image_token_id": "image_token_index"},
    ),
    "clip_vision_model": ConfigClass({
        "hidden_size": 768, "intermediate_size": 3072, "projection_dim": 512, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_channels": 3, "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu",
    }),
    "siglip_vision_model": ConfigClass({
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "num_channels": 3, "image_size": 224, "patch_size": 16, "hidden_act": _GELU, "vision_use_head": True,
    }),
    "qwen2_5_vl": _qwen_wrapper("qwen2_5_vl", is_flat=True),
    "qwen2_5_vl_vision": ConfigClass(
        _QWEN_TOWER | {"depth": 32, "hidden_size": 3584, "hidden_act": "silu", "intermediate_size": 3420,
                       "patch_size": 14, "tokens_per_second": 4, "window_size": 112,
                       "fullatt_block_indexes": [7, 15, 23, 31]},
        aliases=_QWEN_ALIASES,
    ),
    "qwen3_vl": _qwen_wrapper("qwen3_vl"),
    "qwen3_vl_vision": ConfigClass(
        _QWEN_TOWER | {"depth": 27, "hidden_size": 1152, "hidden_act": _GELU, "intermediate_size": 4304,
                       "patch_size": 16, "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]},
        aliases=_QWEN_ALIASES,
    ),
})  # fmt: skip
"""The classes by ``model_type``: the families that the torch engine supports, and Gemma, whose memory trtx plans."""

# One layer in this many attends to all tokens. The classes no longer have the field; they derive layer_types from it.
_PATTERNS = {"gemma2": 2, "gemma3_text": 6}


class ConfigValues(dict[str, Any]):
    """The fields of a config, with the defaults of its class for missing fields.

    ``absent``: the names of the fields that the file does not have.
    """

    def __init__(self, values: Mapping[str, Any], absent: frozenset[str]) -> None:
        super().__init__(values)
        self.absent = absent


def complete(values: Mapping[str, Any]) -> ConfigValues:
    """Adds the defaults of its class, and of the classes of its nested configs, to a whole ``config.json``.

    A null field stays null. A config whose ``model_type`` is not in :data:`CLASSES` gets no defaults.
    """
    return _complete(values, values.get(_TYPE))


def _complete(values: Mapping[str, Any], model_type: object) -> ConfigValues:
    found = CLASSES.get(model_type) if isinstance(model_type, str) else None
    if found is None:
        return ConfigValues(values, frozenset())
    silent = {_TYPE: model_type, **found.fields}
    silent |= {name: values[alias] for alias, name in found.aliases.items() if alias in values}
    if model_type in _PATTERNS and "layer_types" not in values:
        silent["sliding_window_pattern"] = values.get("_sliding_window_pattern", _PATTERNS[str(model_type)])
    inner: dict[str, Any] = {}
    for name, nested in found.nested.items():
        stated = values.get(name)
        if stated is None and name == _TEXT and found.is_flat:
            silent = {**CLASSES[nested.model_type].fields, **silent}
        elif stated is None:
            inner[name] = ConfigValues(_complete(nested.empty, nested.model_type), frozenset())
        elif isinstance(stated, Mapping):
            kind = nested.model_type if nested.is_fixed else stated.get(_TYPE, nested.model_type)
            inner[name] = _complete(stated, kind)
    absent = frozenset(silent.keys() - values.keys())
    return ConfigValues({**silent, **values, **inner}, absent)
