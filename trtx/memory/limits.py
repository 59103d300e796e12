"""The fields of an engine config that determine the memory of a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtx.config.wording import quoted
from trtx.errors import UsageError

# The defaults of each engine. TensorRT-LLM: llm_args.json (2048 since 1.3.0rc7; CUDA graphs up to 128). Torch engine:
# trtx.torch_engine.llm_args and trtx.torch_engine.runner.graphs.
_MAX_BATCH_SIZE = {"tensorrt-llm": 2048, "torch": 256}
_MAX_NUM_TOKENS = 8192
_GRAPH_BATCH = 128
FRACTION = 0.9
# Upper bounds of values that the arithmetic loops over (ranks, sizes of graphs), and of all others (bytes or tokens).
_MOST_RANKS, _MOST_SEQUENCES, _MOST = 1 << 12, 1 << 20, 1 << 48


@dataclass(frozen=True, slots=True)
class Limits:
    """The memory-related fields of an engine config, under shortened names.

    ``moe_tp``: 0 if ``moe_ep`` decides.

    ``max_seq_len``: None: the model's own. ``windows``: attention windows, which repeat over the layers.
    """

    engine: str
    tp: int = 1
    pp: int = 1
    cp: int = 1
    moe_tp: int = 0
    moe_ep: int = 1
    attention_dp: bool = False
    lm_head_tp: bool = False
    expert_slots: int = 0
    max_batch_size: int = 256
    max_num_tokens: int = _MAX_NUM_TOKENS
    max_seq_len: int | None = None
    tokens_per_block: int = 32
    fraction: float = FRACTION
    max_tokens: int | None = None
    max_gpu_total_bytes: int = 0
    kv_dtype: str = "auto"
    dtype: str = "auto"
    windows: tuple[int, ...] = ()
    graph_sizes: tuple[int, ...] = ()
    transfers: bool = False
    transfer_tokens: int | None = None
    speculation: str | None = None
    draft_tokens: int = 0
    draft_model: str | None = None
    draft_layers: tuple[int, ...] = ()

    @property
    def world(self) -> int:
        """The number of GPUs of a worker."""
        return self.tp * self.pp * self.cp


def limits_of(values: Mapping[str, Any], *, engine: str) -> Limits:
    """Reads the limits from the resolved values of one role, as ``trtx.config.load_engine_config`` returns them.

    Raises UsageError, which names the field, for a value that the memory arithmetic can't use.
    """
    config = _Section(values, "")
    kv, transceiver = config.section("kv_cache_config"), config.section("cache_transceiver_config")
    speculative = config.section("speculative_config")
    balancer = config.section("moe_config").values.get("load_balancer")  # a mapping, or the name of a file
    usual_batch = _MAX_BATCH_SIZE.get(engine, _MAX_BATCH_SIZE["tensorrt-llm"])
    batch = config.whole("max_batch_size", most=_MOST_SEQUENCES) or usual_batch
    # AutoDeploy shards over world_size and refuses the other parallel fields.
    is_autodeploy = values.get("backend") == "_autodeploy"
    tp = config.whole("world_size" if is_autodeploy else "tensor_parallel_size", most=_MOST_RANKS) or 1
    moe_tp, moe_ep = (
        max(0, config.whole(f"moe_{kind}_parallel_size", least=-1, most=_MOST_RANKS) or 0)
        for kind in ("tensor", "expert")
    )
    return Limits(
        engine=engine,
        tp=tp,
        pp=config.whole("pipeline_parallel_size", most=_MOST_RANKS) or 1,
        cp=config.whole("context_parallel_size", most=_MOST_RANKS) or 1,
        # As in TensorRT-LLM, one of the two that is not set follows from the other.
        moe_tp=moe_tp,
        moe_ep=moe_ep or max(1, tp // (moe_tp or tp)),
        attention_dp=bool(values.get("enable_attention_dp")),
        lm_head_tp=bool(values.get("enable_lm_head_tp_in_adp")),
        expert_slots=_Section(balancer, "moe_config.load_balancer.").whole("num_slots") or 0
        if isinstance(balancer, Mapping)
        else 0,
        max_batch_size=batch,
        max_num_tokens=config.whole("max_num_tokens") or _MAX_NUM_TOKENS,
        max_seq_len=config.whole("max_seq_len"),
        tokens_per_block=kv.whole("tokens_per_block") or 32,
        fraction=kv.share("free_gpu_memory_fraction", FRACTION),
        max_tokens=kv.whole("max_tokens"),
        max_gpu_total_bytes=kv.whole("max_gpu_total_bytes") or 0,
        kv_dtype=str(kv.values.get("dtype") or "auto"),
        dtype=str(values.get("dtype") or "auto"),
        windows=kv.wholes("max_attention_window"),
        graph_sizes=_graph_sizes(config, batch),
        transfers=bool(transceiver.values.get("backend")),
        transfer_tokens=transceiver.whole("max_tokens_in_buffer"),
        speculation=speculative.text("decoding_type"),
        draft_tokens=speculative.whole("max_draft_len") or speculative.whole("num_nextn_predict_layers") or 0,
        draft_model=speculative.text("speculative_model") or speculative.text("speculative_model_dir"),
        draft_layers=speculative.wholes("eagle3_layers_to_capture"),
    )


@dataclass(frozen=True, slots=True)
class _Section:
    """Typed access to the fields of one section of an engine config. ``prefix``: the section's path."""

    values: Mapping[str, Any]
    prefix: str

    def section(self, name: str) -> _Section:
        value = self.values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self._refused(name, "a section of fields")
        return _Section(value or {}, f"{self.prefix}{name}.")

    def whole(self, name: str, *, least: int = 0, most: int = _MOST) -> int | None:
        value = self.values.get(name)
        if value is None or _is_whole(value, least, most):
            return value
        raise self._refused(name, f"a whole number from {least} to {most}")

    def wholes(self, name: str) -> tuple[int, ...]:
        value = self.values.get(name)
        if value is None:
            return ()
        if isinstance(value, (list, tuple)) and all(_is_whole(item, 0, _MOST) for item in value):
            return tuple(value)
        raise self._refused(name, "a list of whole numbers")

    def share(self, name: str, default: float) -> float:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1:
            return float(value)
        raise self._refused(name, "a number from 0 to 1")

    def text(self, name: str) -> str | None:
        value = self.values.get(name)
        if value is None or isinstance(value, str):
            return value
        raise self._refused(name, "text")

    def _refused(self, name: str, expected: str) -> UsageError:
        return UsageError(f"{self.prefix}{name} is {quoted(self.values[name])}; expected {expected}")


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _graph_sizes(values: _Section, batch: int) -> tuple[int, ...]:
    """Returns the CUDA graph batch sizes: those listed, else TensorRT-LLM's defaults.

    The defaults follow CudaGraphConfig in llm_args.py, 1.3.0rc.
    """
    if values.values.get("cuda_graph_config", {}) is None:
        return ()
    config = values.section("cuda_graph_config")
    if listed := config.wholes("batch_sizes"):
        return tuple(sorted(size for size in listed if size <= batch))
    largest = min(config.whole("max_batch_size", most=_MOST_SEQUENCES) or _GRAPH_BATCH, batch)
    if config.values.get("enable_padding"):
        sizes = {1, 2, 4, *range(8, 129, 8), *range(192, largest + 1, 64), largest}
    else:
        sizes = {*range(1, 33), 64, 128, *(1 << power for power in range(8, largest.bit_length())), largest}
    return tuple(sorted(size for size in sizes if size <= largest))
