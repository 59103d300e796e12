"""Lists the tensors of a decoder's checkpoint. The runner loads this list, and the memory plan counts it."""

from __future__ import annotations

from dataclasses import dataclass

from trtx.checkpoint.experts import expert_modules, router_name
from trtx.checkpoint.formats import TENSOR_SCALES, Loading, TensorSpec
from trtx.checkpoint.model_config import ModelConfig
from trtx.errors import UnsupportedModel

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True, slots=True)
class LinearModule:
    """One linear module of the checkpoint. ``tensors``: its stored tensors (weight and scales), by suffix."""

    name: str
    rows: int
    columns: int
    tensors: dict[str, TensorSpec]


@dataclass(frozen=True, slots=True)
class Product:
    """Linear modules with the same input, computed as one matmul. ``loading``: None for full precision."""

    modules: tuple[LinearModule, ...]
    has_bias: bool
    loading: Loading | None

    @property
    def rows(self) -> int:
        return sum(module.rows for module in self.modules)

    @property
    def columns(self) -> int:
        return self.modules[0].columns

    def is_kept(self, *, scaled_products: frozenset[str]) -> bool:
        """Returns whether the engine keeps the weight quantized, as stored, for the matmul.

        ``scaled_products``: the device's kinds of scaled matmuls (:func:`trtx.checkpoint.formats.products_of`).
        """
        rows = [module.rows for module in self.modules]
        return self.loading is not None and self.loading.is_kept(rows, self.columns, scaled_products=scaled_products)


@dataclass(frozen=True, slots=True)
class ExpertProducts:
    """The linear modules of a layer's experts: for each expert gate, up and down. ``loading``: as in Product."""

    modules: tuple[LinearModule, ...]
    loading: Loading | None
    has_bias: bool = False

    def is_kept(self, *, scaled_products: frozenset[str]) -> bool:
        """As :meth:`Product.is_kept`, for all experts. Their matmuls take no other scales than static ones."""
        if self.loading is None or self.loading.product != TENSOR_SCALES:
            return False
        gate = self.modules[0]
        return self.loading.is_kept([gate.rows], gate.columns, scaled_products=scaled_products)


def product_parameters(config: ModelConfig) -> int:
    """Returns the number of parameters in the matmuls of all layers, without biases and routers."""
    hidden = config.hidden_size
    attention = hidden * (2 * config.q_size + 2 * config.kv_size)
    experts = [config.layer_experts(layer) for layer in range(config.num_layers)]
    dense = 3 * hidden * config.intermediate_size
    return config.num_layers * attention + sum(
        dense if own is None else own.layer_parameters(hidden) for own in experts
    )


def layer_products(config: ModelConfig, layer: int) -> dict[str, Product]:
    """Returns the matmuls of one layer by name, without those of experts.

    Raises UsageError if only some of the modules of one matmul are quantized.
    """
    attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.q_size, config.kv_size
    qkv = {f"{attention}.q_proj": queries, f"{attention}.k_proj": keys, f"{attention}.v_proj": keys}
    products = {
        "qkv": _product(config, qkv, hidden, has_bias=config.qkv_bias),
        "output": _product(config, {f"{attention}.o_proj": hidden}, queries, has_bias=config.output_bias),
    }
    if config.layer_experts(layer) is None:
        products["gate_up"] = _product(config, {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}, hidden)
        products["down"] = _product(config, {f"{mlp}.down_proj": hidden}, inner)
    return products


def _product(config: ModelConfig, rows: dict[str, int], columns: int, *, has_bias: bool = False) -> Product:
    quantization = config.quantization
    covered = [name for name in rows if quantization is not None and quantization.covers(name)]
    if quantization is None or not covered:
        plain = (
            LinearModule(name, count, columns, {"weight": TensorSpec((count, columns))}) for name, count in rows.items()
        )
        return Product(tuple(plain), has_bias, None)
    if others := [name for name in rows if name not in covered]:
        raise UnsupportedModel(
            f"{quantization.source} quantizes {covered[0]} and excludes {others[0]}, one product here; "
            "expected both or neither; serve it with the engine tensorrt-llm"
        )
    modules = (LinearModule(name, count, columns, quantization.stored(count, columns)) for name, count in rows.items())
    return Product(tuple(modules), has_bias, quantization.loading)


def expert_products(config: ModelConfig, layer: int) -> ExpertProducts | None:
    """Returns the linear modules of a layer's experts; None for a dense MLP."""
    experts = config.layer_experts(layer)
    if experts is None:
        return None
    shapes, quantization = expert_modules(experts, config.hidden_size, layer), config.quantization
    is_quantized = quantization is not None and quantization.covers(next(iter(shapes)))
    modules = tuple(
        LinearModule(
            name, rows, columns,
            quantization.stored(rows, columns)
            if quantization is not None and is_quantized
            else {"weight": TensorSpec((rows, columns))},
        )
        for name, (rows, columns) in shapes.items()
    )  # fmt: skip
    loading = quantization.loading if quantization is not None and is_quantized else None
    return ExpertProducts(modules, loading, experts.has_bias)


def layer_vectors(config: ModelConfig, layer: int) -> dict[str, TensorSpec]:
    """Returns the vectors of a layer besides norms and the biases of matmuls: attention sinks, the router's bias."""
    found: dict[str, TensorSpec] = {}
    if config.has_sinks:
        found[sinks_name(layer)] = TensorSpec((config.num_heads,))
    experts = config.layer_experts(layer)
    if experts is not None and experts.has_bias:
        found[f"{router_name(experts, layer)}.bias"] = TensorSpec((experts.count,))
    return found


def sinks_name(layer: int) -> str:
    """Returns the name of a layer's attention sinks, ``[heads]``."""
    return f"model.layers.{layer}.self_attn.sinks"


def layer_norms(config: ModelConfig, layer: int) -> dict[str, TensorSpec]:
    """Returns the norm weights of a layer by name: those of the residual, and the head norms if the model has them."""
    at = f"model.layers.{layer}"
    kinds = ["input_layernorm", "post_attention_layernorm"]
    if config.arithmetic.has_output_norms:
        kinds += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    found = {f"{at}.{kind}.weight": TensorSpec((config.hidden_size,)) for kind in kinds}
    if config.qk_norm:
        found |= {f"{at}.self_attn.{name}_norm.weight": TensorSpec((config.head_dim,)) for name in ("q", "k")}
    return found


def kv_scale_names(layer: int) -> tuple[str, str]:
    """Returns the names of the scales of a layer's keys and of its values."""
    attention = f"model.layers.{layer}.self_attn"
    return f"{attention}.k_proj.k_scale", f"{attention}.v_proj.v_scale"


def checkpoint_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Returns every tensor of the checkpoint by name, in the order in which random weights are generated.

    Raises UsageError.
    """
    found: dict[str, TensorSpec] = {}
    has_kv_scales = config.quantization is not None and config.quantization.kv_cache_algorithm is not None
    for layer in range(config.num_layers):
        found |= layer_norms(config, layer)
        for product in layer_products(config, layer).values():
            for module in product.modules:
                found |= {f"{module.name}.{suffix}": tensor for suffix, tensor in module.tensors.items()}
            if product.has_bias:
                found |= {f"{module.name}.bias": TensorSpec((module.rows,)) for module in product.modules}
        found |= layer_vectors(config, layer)
        if (experts := config.layer_experts(layer)) is not None:
            found[f"{router_name(experts, layer)}.weight"] = TensorSpec(config.router_shape)
        if (products := expert_products(config, layer)) is not None:
            for module in products.modules:
                found |= {f"{module.name}.{suffix}": tensor for suffix, tensor in module.tensors.items()}
                if products.has_bias:
                    found[f"{module.name}.bias"] = TensorSpec((module.rows,))
        if has_kv_scales:
            found |= {name: TensorSpec((), "float32", is_optional=True) for name in kv_scale_names(layer)}
    found[EMBEDDING] = TensorSpec((config.vocab_size, config.hidden_size))
    found[FINAL_NORM] = TensorSpec((config.hidden_size,))
    if not config.tied_head:
        found[HEAD] = TensorSpec((config.vocab_size, config.hidden_size))
    return found
