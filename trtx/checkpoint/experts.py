"""The experts of a mixture-of-experts decoder: their fields in ``config.json`` and the names of their tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trtx.checkpoint.documents import Fields

_COUNT, _COUNT_OF_TRANSFORMERS = "num_experts", "num_local_experts"
_PER_TOKEN, _WIDTH, _STEP, _DENSE = (
    "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers",
)  # fmt: skip
_OF_GPT_OSS = ("swiglu_alpha", "swiglu_limit", "experts_per_token", "initial_context_length")
_OF_EVERY_KIND = frozenset((_COUNT, _COUNT_OF_TRANSFORMERS, _PER_TOKEN))
EXPERT_FIELDS: Mapping[str | None, frozenset[str]] = {
    None: frozenset(),
    "qwen3_moe": _OF_EVERY_KIND | {_WIDTH, _STEP, _DENSE, "norm_topk_prob"},
    "gpt_oss": _OF_EVERY_KIND | {*_OF_GPT_OSS},
}
"""The fields of ``config.json`` that :func:`read_experts` and :func:`read_gpt_oss_experts` read, by
:attr:`trtx.checkpoint.families.Family.experts`."""
EXPERT_FORMATS = ("FP8", "FP8_BLOCK_SCALES", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
"""The quantized formats of a Qwen3-MoE's experts that the torch engine loads, by algorithm."""
MXFP4 = "MXFP4"
_MOST_EXPERTS = 1 << 12
_MOST_WIDTH = 1 << 20
_OF_ONE = re.compile(
    r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj"
    r"\.(weight|bias|weight_scale|weight_scale_inv|input_scale)"
)
_OF_ALL = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(?:_(bias|blocks|scales))?")

ExpertSlice = tuple[int, slice]
"""The place of one expert's weight in the weights of all experts of a layer: the expert, and its rows."""


@dataclass(frozen=True, slots=True)
class StackPlace:
    """The place of one expert's tensor in the stack of its layer. ``index``: the place as an index of torch."""

    stack: str
    shape: tuple[int, ...]
    index: ExpertSlice | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StackName:
    """The name of a tensor that holds all experts of a layer.

    ``kind``: "gate_up" or "down". ``content``: "weight", "bias", or "blocks" or "scales" of MXFP4.
    """

    at: str  # the name up to ``experts``
    kind: str
    content: str

    def of_expert(self, expert: int, part: str) -> str:
        """Returns the name of one expert's own tensor. ``part``: "gate", "up" or "down"."""
        return f"{self.at}.{expert}.{part}_proj.{'bias' if self.content == 'bias' else 'weight'}"


@dataclass(frozen=True, slots=True)
class GateClamp:
    """A clamped SwiGLU: ``(up + 1) * gate * sigmoid(alpha * gate)``.

    The gate is at most ``limit``, and up is from ``-limit`` to ``limit``.
    """

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """The routed experts of a decoder. ``sparse``: for each layer whether it has experts instead of a dense MLP.

    ``count``: the experts that the router chooses from. ``held``: those whose weights one rank holds; None: all.
    ``has_bias``: router and experts have biases. ``clamp``: None for ``silu(gate) * up``. ``is_interleaved``: the
    checkpoint stores all experts of a layer transposed, with alternating columns of gate and up. ``is_mxfp4``: it
    stores them in MXFP4, not transposed; they are dequantized when they are read.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalizes: bool  # whether the weights of a token's experts are divided by their sum
    sparse: tuple[bool, ...]
    held: range | None = None
    has_bias: bool = False
    clamp: GateClamp | None = None
    is_interleaved: bool = False
    is_mxfp4: bool = False

    @property
    def formats(self) -> tuple[str, ...]:
        """The quantized formats of these experts that the torch engine keeps, by algorithm."""
        return () if self.has_bias else EXPERT_FORMATS

    @property
    def router_module(self) -> str:
        """The name of the router within a layer's MLP."""
        return "router" if self.has_bias else "gate"

    @property
    def own(self) -> range:
        """The experts whose weights are held."""
        return range(self.count) if self.held is None else self.held

    def stack_shape(self, hidden: int, kind: str) -> tuple[int, int, int]:
        """Returns the shape of the held experts' weights of a layer. ``kind``: "gate_up" or "down"."""
        inner = self.intermediate_size
        held = len(self.own)
        return (held, 2 * inner, hidden) if kind == "gate_up" else (held, hidden, inner)

    def rows(self, kind: str) -> slice:
        """Returns the rows of one expert's ``gate``, ``up`` or ``down`` weight in its stack."""
        inner = self.intermediate_size
        return {"gate": slice(0, inner), "up": slice(inner, 2 * inner), "down": slice(None)}[kind]

    def layer_parameters(self, hidden: int) -> int:
        """Returns the number of parameters of one layer's held experts, without the router."""
        return 3 * len(self.own) * self.intermediate_size * hidden


def read_experts(config: Fields, num_layers: int) -> ExpertConfig:
    """Reads the experts of a Qwen3-MoE as transformers 5.23 does. Raises UsageError, which names the field."""
    count = _count(config)
    per_token = config.count(_PER_TOKEN, most=_MOST_EXPERTS)
    if per_token > count:
        config.refuse(_PER_TOKEN, f"at most {_COUNT}, {count}")
    step = config.count(_STEP, most=1 << 12)
    dense = config.values.get(_DENSE) or []
    if not isinstance(dense, list) or any(isinstance(layer, bool) or not isinstance(layer, int) for layer in dense):
        config.refuse(_DENSE, "a list of layers")
    return ExpertConfig(
        count=count,
        per_token=per_token,
        intermediate_size=config.count(_WIDTH, most=_MOST_WIDTH),
        normalizes=config.flag("norm_topk_prob", missing=False),
        sparse=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
    )


def read_gpt_oss_experts(config: Fields, num_layers: int, *, original_positions: int, is_mxfp4: bool) -> ExpertConfig:
    """Reads the experts of a gpt-oss as transformers 5.23 does. Raises UsageError, which names the field.

    transformers ignores ``experts_per_token`` and ``initial_context_length``, which published files have too; they must
    agree with the fields that it reads. ``original_positions``: of the rope scaling.
    """
    count = _count(config)
    per_token = config.count(_PER_TOKEN, most=_MOST_EXPERTS)
    if per_token > count:
        config.refuse(_PER_TOKEN, f"at most {_COUNT_OF_TRANSFORMERS}, {count}")
    if config.has("experts_per_token") and config.values["experts_per_token"] != per_token:
        config.refuse("experts_per_token", f"{per_token} as in {_PER_TOKEN}, or no such field")
    if config.has("initial_context_length") and config.values["initial_context_length"] != original_positions:
        config.refuse(
            "initial_context_length",
            f"{original_positions} as original_max_position_embeddings of the rope scaling, or no such field",
        )
    for name in ("swiglu_alpha", "swiglu_limit"):
        if type(config.values.get(name)) is int:
            config.refuse(name, "a number with a decimal point, as transformers takes no integer there")
    return ExpertConfig(
        count=count,
        per_token=per_token,
        intermediate_size=config.count("intermediate_size", most=_MOST_WIDTH),
        normalizes=True,  # a softmax over the chosen experts is the softmax over all, divided by the sum of the chosen
        sparse=(True,) * num_layers,
        has_bias=True,
        clamp=GateClamp(config.number("swiglu_alpha"), config.number("swiglu_limit", at_least=0.0)),
        is_interleaved=True,
        is_mxfp4=is_mxfp4,
    )


def _count(config: Fields) -> int:
    """Returns the number of experts, which transformers 5 writes as ``num_local_experts``."""
    absent: frozenset[str] = getattr(config.values, "absent", frozenset())
    names = (_COUNT, _COUNT_OF_TRANSFORMERS)
    stated = [name for name in names if config.has(name) and name not in absent]
    silent = [name for name in names if name in config.values] or [_COUNT]
    counts = {config.count(name, most=_MOST_EXPERTS) for name in stated or silent[:1]}
    if len(counts) > 1:
        config.refuse(_COUNT_OF_TRANSFORMERS, f"{config.values[_COUNT]} as in {_COUNT}, or no such field")
    return counts.pop()


def router_name(config: ExpertConfig, layer: int) -> str:
    """Returns the name of a layer's router, whose weight is ``[experts, hidden]``."""
    return f"model.layers.{layer}.mlp.{config.router_module}"


def expert_modules(config: ExpertConfig, hidden: int, layer: int) -> dict[str, tuple[int, int]]:
    """Returns the (rows, columns) of each linear module of a layer's held experts, by its published name."""
    inner = config.intermediate_size
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return {
        f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj": shape
        for expert in config.own
        for kind, shape in shapes.items()
    }


def stack_name(layer: int, kind: str) -> str:
    """Returns transformers' name for the weights of all experts of a layer. ``kind``: "gate_up" or "down"."""
    return f"model.layers.{layer}.mlp.experts.{kind}_proj"


def parse_stack(name: str) -> StackName | None:
    """Parses the name of a tensor that holds all experts of a layer; None for any other tensor."""
    found = _OF_ALL.fullmatch(name)
    if found is None:
        return None
    return StackName(name[: name.index(".experts.") + len(".experts")], found.group(2), found.group(3) or "weight")


def is_expert(name: str) -> bool:
    """Returns whether a tensor belongs to a single expert."""
    return _OF_ONE.fullmatch(name) is not None


def stack_place(config: ExpertConfig, hidden: int, name: str, shape: tuple[int, ...] = ()) -> StackPlace | None:
    """Returns the place of a held expert's weight or scale in a stack of its layer; None for any other tensor.

    A stack of biases or scales has the name of its stack of weights and their suffix. With scales of ``shape``, stacks
    are ``[held, 2, *shape]`` for gate and up, and ``[held, *shape]`` for down; those of biases are ``[held, rows]``.
    """
    found = _OF_ONE.fullmatch(name)
    if found is None:
        return None
    layer, kind, suffix = int(found.group(1)), found.group(3), found.group(4)
    expert, held = int(found.group(2)) - config.own.start, len(config.own)
    of = "down" if kind == "down" else "gate_up"
    stack = stack_name(layer, of)
    if suffix == "weight":
        return StackPlace(stack, config.stack_shape(hidden, of), (expert, config.rows(kind)))
    if suffix == "bias":
        return StackPlace(f"{stack}.bias", config.stack_shape(hidden, of)[:2], (expert, config.rows(kind)))
    if kind == "down":
        return StackPlace(f"{stack}.{suffix}", (held, *shape), (expert,))
    return StackPlace(f"{stack}.{suffix}", (held, 2, *shape), (expert, int(kind == "up")))
