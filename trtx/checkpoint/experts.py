"""The experts of a mixture-of-experts decoder: their fields in ``config.json`` and the names of their tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from trtx.checkpoint.documents import Fields

_COUNT, _COUNT_OF_TRANSFORMERS = "num_experts", "num_local_experts"
_PER_TOKEN, _WIDTH, _STEP, _DENSE = (
    "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers",
)  # fmt: skip
EXPERT_FIELDS = frozenset((_COUNT, _COUNT_OF_TRANSFORMERS, _PER_TOKEN, _WIDTH, _STEP, _DENSE, "norm_topk_prob"))
"""The fields of ``config.json`` that :func:`read_experts` reads."""
EXPERT_FORMATS = ("FP8",)
"""The quantized formats of experts that the torch engine loads, by algorithm."""
_MOST_EXPERTS = 1 << 12
_MOST_WIDTH = 1 << 20
_OF_ONE = re.compile(
    r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.(weight|weight_scale|input_scale)"
)
_OF_ALL = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj")

ExpertSlice = tuple[int, slice]
"""The place of one expert's weight in the weights of all experts of a layer: the expert, and its rows."""


@dataclass(frozen=True, slots=True)
class StackPlace:
    """The place of one expert's tensor in the stack of its layer. ``index``: of the stack, for torch."""

    stack: str
    shape: tuple[int, ...]
    index: ExpertSlice | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """The routed experts of a decoder. ``sparse``: for each layer whether it has experts instead of a dense MLP.

    ``count``: the experts that the router chooses from. ``held``: those whose weights one rank holds; None: all.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalizes: bool  # whether the weights of a token's experts are divided by their sum
    sparse: tuple[bool, ...]
    held: range | None = None

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


def _count(config: Fields) -> int:
    """Returns the number of experts, which transformers 5 writes as ``num_local_experts``."""
    absent: frozenset[str] = getattr(config.values, "absent", frozenset())
    stated = [name for name in (_COUNT, _COUNT_OF_TRANSFORMERS) if config.has(name) and name not in absent]
    counts = {config.count(name, most=_MOST_EXPERTS) for name in stated or [_COUNT]}
    if len(counts) > 1:
        config.refuse(_COUNT_OF_TRANSFORMERS, f"{config.values[_COUNT]} as in {_COUNT}, or no such field")
    return counts.pop()


def router_name(layer: int) -> str:
    """Returns the name of a layer's router weight, ``[experts, hidden]``."""
    return f"model.layers.{layer}.mlp.gate.weight"


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


def stack_kind(name: str) -> str | None:
    """Returns "gate_up" or "down" if the tensor holds all experts of a layer, else None."""
    found = _OF_ALL.fullmatch(name)
    return found.group(2) if found else None


def is_expert(name: str) -> bool:
    """Returns whether a tensor belongs to a single expert."""
    return _OF_ONE.fullmatch(name) is not None


def stack_place(config: ExpertConfig, hidden: int, name: str) -> StackPlace | None:
    """Returns the place of a held expert's weight or scale in a stack of its layer; None for any other tensor.

    A stack of scales has the name of its stack of weights and the scales' suffix. It is ``[held, 2]`` for the scales
    of gate and up, and ``[held]`` for those of down.
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
    if kind == "down":
        return StackPlace(f"{stack}.{suffix}", (held,), (expert,))
    return StackPlace(f"{stack}.{suffix}", (held, 2), (expert, int(kind == "up")))


def stack_parts(config: ExpertConfig, name: str) -> Iterator[tuple[str, ExpertSlice]]:
    """Yields the name and the place of every expert's tensor in the stack ``name``."""
    at, kind = name.rpartition(".")[0], stack_kind(name)
    for expert in range(config.count):
        for part in ("gate", "up") if kind == "gate_up" else ("down",):
            yield f"{at}.{expert}.{part}_proj.weight", (expert, config.rows(part))
