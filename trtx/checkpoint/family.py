"""What transformers' config class of a dense architecture assumes where ``config.json`` says nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trtx.checkpoint.rope import Mrope


@dataclass(frozen=True, slots=True)
class Family:
    """What transformers' model of an architecture computes, and what its config class derives from other fields.

    Defaults of missing fields are in :data:`trtx.checkpoint.class_defaults.CLASSES`. ``kv_heads``: whether null means
    as many as query heads. ``derives_head_dim``: where it is missing or null. ``window``: of ``sliding_window`` where
    ``use_sliding_window`` switches it on, a field that the class does not know, or one that holds whatever a switch
    says.
    """

    model_type: str
    kv_heads: Literal["derived", "stated"] = "derived"
    derives_head_dim: bool = False
    window: Literal["switched", "unknown", "always"] = "switched"
    qkv_bias: bool | None = None  # None: as attention_bias says, of the output projection too; else whatever it says
    qk_norm: bool = False
    takes_head_dim: bool = True  # else it is hidden_size / num_attention_heads whatever the field says
    mrope: Mrope | None = None
