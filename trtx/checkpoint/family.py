"""The properties of a dense architecture that transformers' config class and model imply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trtx.checkpoint.rope import MropeSections


@dataclass(frozen=True, slots=True)
class Family:
    """The features of transformers' model of an architecture, and the fields that its config class derives.

    :data:`trtx.checkpoint.class_defaults.CLASSES` has the defaults of missing fields.
    ``kv_heads``: "derived" if null means as many KV heads as query heads. ``derives_head_dim``: the class computes
    head_dim if it is missing or null. ``window``: whether ``sliding_window`` applies only if ``use_sliding_window`` is
    true ("switched"), the class does not have the field ("unknown"), or it applies whatever the switch says ("always").
    """

    model_type: str
    kv_heads: Literal["derived", "stated"] = "derived"
    derives_head_dim: bool = False
    window: Literal["switched", "unknown", "always"] = "switched"
    qkv_bias: bool | None = None  # None: attention_bias decides, for the output projection too; else it is ignored
    qk_norm: bool = False
    takes_head_dim: bool = True  # False: always hidden_size / num_attention_heads; the field is ignored
    mrope: MropeSections | None = None
