"""Parses and validates the ``config.json`` of a decoder, for the torch engine and its memory plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtx.checkpoint.documents import Fields, config_fields, shown, shown_name
from trtx.checkpoint.experts import (
    EXPERT_FIELDS,
    MXFP4,
    ExpertConfig,
    expert_modules,
    read_experts,
    read_gpt_oss_experts,
)
from trtx.checkpoint.families import COMMON, FAMILIES, NESTED_FAMILIES, Arithmetic, Family
from trtx.checkpoint.formats import DTYPES, MX_BLOCK
from trtx.checkpoint.gemma3 import GEMMA3_FIELDS, Gemma3, global_rope, read_gemma3
from trtx.checkpoint.known_fields import GELU, ONLY, PREFIXES_WITHOUT_EFFECT, WITHOUT_EFFECT
from trtx.checkpoint.quantization import Quantization, check_loadable, read_quantization
from trtx.checkpoint.rope import RopeConfig, read_rope
from trtx.checkpoint.vision import (
    WRAPPERS,
    VisionConfig,
    Wrapper,
    decoder_fields,
    is_tied,
    parse_vision,
    refuse_quantized,
)
from trtx.checkpoint.weight_index import stored_dtype
from trtx.checkpoint.windows import Windows, read_windows, refuse_nested_windows, sliding_layers
from trtx.errors import UnsupportedModel

DRAWN_WEIGHTS = "trtx_synthetic"
"""The key of config.json that marks a checkpoint without weights: the engine generates them from its seed and std."""

LARGEST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
    "max_position_embeddings": 1 << 24,
}
"""Upper bounds of the sizes, well above those of every published model (Llama 4 Scout has 10,485,760 positions). A
larger value is an error, which would otherwise appear only after a long time of counting and allocating."""

_FIELDS_OF_EXPERTS: frozenset[str] = frozenset().union(*EXPERT_FIELDS.values())
KNOWN = frozenset((
    *LARGEST, *_FIELDS_OF_EXPERTS, *GEMMA3_FIELDS, "rms_norm_eps", "attention_bias", "tie_word_embeddings",
    "quantization_config", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types",
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder of one of the FAMILIES, alone or nested in one of :data:`WRAPPERS`."""

    architecture: str  # the checkpoint's architecture; if the decoder is nested, that of the wrapper
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position: int  # the longest sequence in tokens, including rope scaling
    rope: RopeConfig
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    dtype: str  # the checkpoint's dtype, such as "bfloat16"
    synthetic_seed: int | None  # the seed of generated weights; None: the weights are stored
    synthetic_std: float
    quantization: Quantization | None = None
    vision: VisionConfig | None = None  # the wrapper's multimodal inputs
    windows: Windows = ()
    experts: ExpertConfig | None = None
    has_sinks: bool = False  # each head has a learned logit in the denominator of its softmax, without a value
    arithmetic: Arithmetic = COMMON
    gemma3: Gemma3 | None = None

    def layer_experts(self, layer: int) -> ExpertConfig | None:
        """Returns the experts of a layer, or None if its MLP is dense."""
        return self.experts if self.experts is not None and self.experts.sparse[layer] else None

    @property
    def router_shape(self) -> tuple[int, int]:
        """The shape of a sparse layer's router weight: ``(experts, hidden)``."""
        return (self.experts.count if self.experts is not None else 0, self.hidden_size)

    @property
    def embedding_scale(self) -> float | None:
        """The factor of the embeddings, which are rounded to their dtype afterwards; None: they are not scaled."""
        return self.hidden_size**0.5 if self.arithmetic.scales_embeddings else None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def read_model_config(model_dir: Path) -> ModelConfig:
    """Reads ``model_dir/config.json`` and the quantization config.

    Every field is honoured as in transformers 5.23, or refused. Raises UsageError, which names file, field and value,
    for a missing field, for an invalid value, and for a feature that the torch engine does not compute exactly.
    """
    config = config_fields(model_dir)
    architecture = _architecture(config)
    if architecture in WRAPPERS:
        return _read_wrapped(config, architecture, model_dir)
    family = FAMILIES[architecture]
    _refuse_unknown(config, architecture, family)
    quantization = read_quantization(model_dir, config.values)
    if family.experts == "gpt_oss" and quantization is not None and quantization.algorithm == MXFP4:
        _check_mxfp4(config, quantization)
        return _parse(config, architecture, family, None, model_dir, is_mxfp4=True)
    check_loadable(quantization, model_dir, config.values)
    return _parse(config, architecture, family, quantization, model_dir)


def _check_mxfp4(config: Fields, quantization: Quantization) -> None:
    """Refuses an MXFP4 checkpoint whose experts are not all quantized as published ones are."""
    if any("experts" in module for module in quantization.excluded):
        raise UnsupportedModel(
            f"{quantization.source} excludes experts from {MXFP4}, and the torch engine expects all experts of a "
            "gpt-oss in one format; use the original checkpoint or the engine tensorrt-llm"
        )
    for name in ("hidden_size", "intermediate_size"):
        if config.count(name, most=LARGEST[name]) % MX_BLOCK:
            config.refuse(name, f"a multiple of {MX_BLOCK}, the block of {MXFP4}")


def _architecture(config: Fields) -> str:
    listed = config.values.get("architectures")
    if not isinstance(listed, list) or len(listed) != 1 or not isinstance(listed[0], str):
        config.refuse("architectures", "a list of one name")
    architecture = listed[0]
    known = {name: family.model_type for name, family in FAMILIES.items()}
    known |= {name: wrapper.model_type for name, wrapper in WRAPPERS.items()}
    if architecture not in known:
        raise UnsupportedModel(
            f"{config.file}: architecture {shown_name(architecture)} is not known to the torch engine; "
            f"expected one of {', '.join(known)}, or the engine tensorrt-llm"
        )
    wanted = known[architecture]
    if config.values.get("model_type") != wanted:  # transformers uses model_type, engines use architectures
        config.refuse("model_type", f"{wanted!r}, as architectures says {architecture}")
    return architecture


def _read_wrapped(config: Fields, architecture: str, model_dir: Path) -> ModelConfig:
    """Parses the decoder in ``text_config``."""
    vision = parse_vision(config, architecture)
    text = decoder_fields(config, architecture)
    own, family = _text_family(text, WRAPPERS[architecture])
    _refuse_unknown(text, own, family)
    if read_quantization(model_dir, config.values) is not None or text.has("quantization_config"):
        refuse_quantized(model_dir, architecture)
    outer, inner = _dtype(config), _dtype(text)
    if outer and inner and outer != inner:  # which one a module gets depends on how transformers is called
        text.refuse("dtype" if text.has("dtype") else "torch_dtype", f"{outer!r} as outside text_config")
    seed, std = _synthetic(config)
    decoder = _parse(text, own, family, None, model_dir)
    refuse_nested_windows(text, decoder.windows)
    return replace(
        decoder,
        architecture=architecture,
        tied_head=is_tied(config, architecture),
        dtype=outer or inner or stored_dtype(model_dir),
        synthetic_seed=seed,
        synthetic_std=std,
        vision=vision,
    )


def _text_family(text: Fields, wrapper: Wrapper) -> tuple[str, Family]:
    """Returns the name for messages and the family of a nested decoder.

    The family follows from ``model_type``, as in transformers; ``architectures`` may be missing there.
    """
    dense = {family.model_type: (name, family) for name, family in FAMILIES.items() if family.experts is None}
    known = dense if wrapper.text_type is None else {wrapper.text_type: ("", NESTED_FAMILIES[wrapper.text_type])}
    kind = text.word("model_type", f"one of {', '.join(known)}")
    if kind not in known:
        text.refuse_here(
            "model_type",
            f"one of {', '.join(known)}: the torch engine computes no other decoder there; use another checkpoint or "
            "the engine tensorrt-llm",
        )
    name, family = known[kind]
    if text.has("architectures") and text.values["architectures"] != [name]:
        text.refuse("architectures", f"{f'[{name!r}], as its model_type is {kind}, or ' if name else ''}no such field")
    return name or kind, family


def _refuse_unknown(config: Fields, architecture: str, family: Family) -> None:
    """Refuses unknown fields, unless they are null, false, 0 or empty, so that no field is silently ignored."""
    allowed_values = ONLY
    if family.arithmetic.gates_with_gelu and not family.is_gemma3:  # whose hidden_activation names the gate
        allowed_values = ONLY | {"hidden_act": GELU}
    for name, allowed in allowed_values.items():
        if config.has(name) and config.values[name] not in allowed:
            config.refuse_here(
                name,
                f"{shown(allowed[0])}: the torch engine does not compute {architecture} with anything else; use "
                "another checkpoint or the engine tensorrt-llm",
            )
    for name, value in config.values.items():
        is_known = name in KNOWN or name in ONLY or name in WITHOUT_EFFECT or name.startswith(PREFIXES_WITHOUT_EFFECT)
        is_known &= name in EXPERT_FIELDS[family.experts] or name not in _FIELDS_OF_EXPERTS
        is_known &= family.is_gemma3 or name not in GEMMA3_FIELDS
        if value and not is_known:
            config.refuse_here(
                name,
                f"no such field in a {architecture}: the torch engine does not know what it asks for; delete it if "
                "the answers do not depend on it, or serve it with the engine tensorrt-llm",
            )


def _parse(
    config: Fields,
    architecture: str,
    family: Family,
    quantization: Quantization | None,
    model_dir: Path,
    *,
    is_mxfp4: bool = False,
) -> ModelConfig:
    sizes = {name: config.count(name, most=LARGEST[name]) for name in LARGEST if _is_needed(name, config, family)}
    heads, kv_heads, head_dim = _heads(config, family, sizes)
    attention_bias = config.flag("attention_bias", missing=False)
    seed, std = _synthetic(config)
    stated = sizes["max_position_embeddings"]
    gemma3 = None
    if family.is_gemma3:
        rope = global_rope(config, max_position=stated)
        is_local = sliding_layers(config, family, sizes["num_hidden_layers"])
        gemma3 = read_gemma3(config, head_dim=head_dim, is_local=is_local)
    else:
        rope = read_rope(
            config, default_theta=family.theta, max_position=stated, mrope=family.mrope, head_dim=head_dim,
            silent=family.silent_rope,
        )  # fmt: skip
    max_position = rope.longest(stated)
    experts = None
    if family.experts == "qwen3_moe":
        experts = read_experts(config, sizes["num_hidden_layers"])
    elif family.experts == "gpt_oss":
        original = rope.original_max_position if rope.yarn is not None else stated
        experts = read_gpt_oss_experts(
            config, sizes["num_hidden_layers"], original_positions=original, is_mxfp4=is_mxfp4
        )
    if experts is not None and quantization is not None:
        _check_quantized_experts(experts, sizes["hidden_size"], quantization)
    return ModelConfig(
        architecture=architecture,
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=config.number("rms_norm_eps", at_least=0.0),
        max_position=max_position,
        rope=rope,
        tied_head=config.flag("tie_word_embeddings", missing=False),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias and family.qkv_bias is None,
        qk_norm=family.qk_norm,
        dtype=_dtype(config) or stored_dtype(model_dir),
        synthetic_seed=seed,
        synthetic_std=std,
        quantization=quantization,
        windows=read_windows(config, family, sizes["num_hidden_layers"], max_position),
        experts=experts,
        has_sinks=family.has_sinks,
        arithmetic=family.arithmetic,
        gemma3=gemma3,
    )


def _check_quantized_experts(experts: ExpertConfig, hidden: int, quantization: Quantization) -> None:
    """Refuses formats of experts that the torch engine does not load, and layers of which only a part is quantized."""
    for layer, is_sparse in enumerate(experts.sparse):
        modules = expert_modules(experts, hidden, layer) if is_sparse else {}
        covered = [module for module in modules if quantization.covers(module)]
        if covered and quantization.algorithm not in experts.formats:
            formats = ", ".join(experts.formats) or f"in {MXFP4} as published"
            raise UnsupportedModel(
                f"{quantization.source} quantizes experts to {quantization.algorithm}, and the torch engine computes "
                f"experts in full precision or {formats}; use the original checkpoint or the engine tensorrt-llm"
            )
        if covered and (excluded := [module for module in modules if not quantization.covers(module)]):
            raise UnsupportedModel(
                f"{quantization.source} quantizes {covered[0]} and excludes {excluded[0]}; the torch engine expects "
                "all experts of a layer in one precision: serve it with the engine tensorrt-llm"
            )


def _is_needed(name: str, config: Fields, family: Family) -> bool:
    """Returns whether a size must be in the config: it is present, or transformers' class does not derive it."""
    if config.has(name):
        return True
    if name == "num_key_value_heads":
        return family.kv_heads == "stated"
    return name != "head_dim" or not family.derives_head_dim


def head_shape(sizes: Mapping[str, Any]) -> tuple[int, int, int]:
    """Returns (heads, KV heads, head_dim) of any decoder, with the defaults that transformers has for most models."""
    heads = int(sizes["num_attention_heads"])
    return (
        heads,
        int(sizes.get("num_key_value_heads") or heads),
        int(sizes.get("head_dim") or sizes["hidden_size"] // heads),
    )


def _heads(config: Fields, family: Family, sizes: dict[str, int]) -> tuple[int, int, int]:
    """Returns (heads, KV heads, head_dim), checked for consistency."""
    (heads, kv_heads, head_dim), hidden = head_shape(sizes), sizes["hidden_size"]
    if heads % kv_heads:
        config.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
    if hidden % heads and (
        "head_dim" not in sizes or family.model_type == "llama"
    ):  # LlamaConfig.validate_architecture
        config.refuse("num_attention_heads", f"a divisor of hidden_size, {hidden}")
    if not family.takes_head_dim and head_dim * heads != hidden:
        config.refuse("head_dim", f"{hidden // heads}, hidden_size / num_attention_heads, or no such field")
    if head_dim % 2:
        config.refuse(
            "head_dim" if "head_dim" in sizes else "hidden_size", f"heads of an even size, not {head_dim}, to rotate"
        )
    return heads, kv_heads, head_dim


def _dtype(config: Fields) -> str | None:
    wanted = f"one of {', '.join(DTYPES)}"
    found = {name: config.word(name, wanted) for name in ("dtype", "torch_dtype") if config.has(name)}
    for name, dtype in found.items():
        if dtype not in DTYPES:
            config.refuse(name, wanted)
    if len(set(found.values())) > 1:
        config.refuse("torch_dtype", f"{found['dtype']!r} as in dtype, or no such field")
    return next(iter(found.values()), None)


def _synthetic(config: Fields) -> tuple[int | None, float]:
    """Returns (seed, standard deviation) of generated weights; the seed is None if the weights are stored."""
    std = config.number("initializer_range", at_least=0.0) if config.has("initializer_range") else 0.02
    stated = config.inner(DRAWN_WEIGHTS)
    if stated is None or not stated.values:
        return None, std
    seed: Any = stated.values.get("seed")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        stated.refuse("seed", "an integer of at least 0")
    return seed, stated.number("init_std", at_least=0.0) if stated.has("init_std") else std
