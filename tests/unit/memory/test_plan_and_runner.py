"""Any checkpoint of a dense family: what the plan says of the torch engine's memory is what its runner takes.

Weights are loaded for each device as its runner would load them; on a GPU's behalf too, as loading needs no kernel.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published_models import DEEPSEEK_R1
from safetensors.torch import save_file

from trtx.checkpoint.dense import checkpoint_tensors
from trtx.checkpoint.experts import EXPERT_FORMATS
from trtx.checkpoint.families import FAMILIES
from trtx.checkpoint.formats import DTYPES, LOADED, products_of
from trtx.checkpoint.model_config import ModelConfig, read_model_config
from trtx.checkpoint.tensor_parallel import RankSizes, check_ranks
from trtx.errors import UsageError
from trtx.memory import MemoryDevice, device_named, plan_memory, torch_engine
from trtx.torch_engine.kv_layout import KvGeometry, layer_groups
from trtx.torch_engine.runner import RunnerArgs, create_runner, kv_sizing
from trtx.torch_engine.runner.rank_split import RankSplit
from trtx.torch_engine.runner.weights import load_weights

pytestmark = pytest.mark.slow

GIB = 1 << 30
HOST = MemoryDevice("CPU", 64 * GIB, 64 * GIB, is_gpu=False)
DEVICES = (HOST, device_named("A100"), device_named("H100"), device_named("B200"))
LIMITS = {"max_batch_size": 3, "max_num_tokens": 64}
GROUP = 32


@dataclass(frozen=True)
class FirstOf:
    """A :class:`RankGroup` for loading alone."""

    size: int
    rank: int = 0

    def add(self, partial: torch.Tensor) -> torch.Tensor:
        return partial

    def join(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def share(self, value: torch.Tensor) -> None:
        return None

    def smallest(self, number: int) -> int:
        return number


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """(config.json, what hf_quant_config.json says, whether optional tensors are stored)"""
    architecture = draw(st.sampled_from(sorted(FAMILIES)))
    family = FAMILIES[architecture]
    algorithm = draw(st.sampled_from((None, *LOADED)))
    # Products that are no multiple of 16 are never scaled ones; the groups of the 4-bit formats need more.
    free = algorithm not in ("NVFP4", "W4A16_AWQ")
    heads = draw(st.sampled_from((2, 4)))
    config: dict[str, Any] = {
        "architectures": [architecture], "model_type": family.model_type, "vocab_size": draw(st.integers(2, 80)),
        "hidden_size": draw(st.sampled_from((64, 64, 128))),
        "intermediate_size": draw(st.sampled_from((32, 64, 72, 128) if free else (32, 64))),
        "num_hidden_layers": draw(st.integers(1, 2)), "num_attention_heads": heads, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    }  # fmt: skip
    if family.experts == "gpt_oss":
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    elif family.experts == "qwen3_moe":
        width, dense = draw(st.sampled_from((32, 40))), draw(st.sampled_from(([], [0])))
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": width, "mlp_only_layers": dense}
    kv_heads = draw(st.sampled_from([None] * (family.kv_heads == "missing or null") + [1, heads]))
    head_dim = draw(st.sampled_from([None] * family.derives_head_dim + [16, 32, 128] + [6] * free))
    optional = {
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": draw(st.sampled_from((None, True, False))),
        "attention_bias": draw(st.sampled_from((None, True, False))),
        draw(st.sampled_from(("dtype", "torch_dtype"))): draw(st.sampled_from((None, *DTYPES))),
    }
    config |= {name: value for name, value in optional.items() if value is not None}
    excluded = draw(st.lists(st.sampled_from(["lm_head", "*.mlp.*", "*layers.0*", "*o_proj"]), unique=True))
    is_kept = family.experts == "qwen3_moe" and algorithm in EXPERT_FORMATS
    excluded += ["*.mlp.gate" if is_kept else "*.mlp.*"] * (family.experts is not None)
    quantization = {
        "quant_algo": algorithm, "kv_cache_quant_algo": draw(st.sampled_from((None, "FP8"))),
        "group_size": GROUP if algorithm == "W4A16_AWQ" else None, "exclude_modules": excluded,
    }  # fmt: skip
    if draw(st.booleans()):  # in config.json alone
        stated = {name: value for name, value in quantization.items() if name != "exclude_modules"}
        config["quantization_config"] = {"quant_method": "modelopt", **stated, "ignore": excluded}
        quantization = {}
    return config, quantization, draw(st.booleans())


def _write(
    directory: Path, config: dict[str, Any], quantization: dict[str, Any], has_optional: bool, stored: str
) -> ModelConfig:
    """``stored``: the dtype of what the format leaves open. Ones throughout: scales are equal, as builds share them."""
    for file in directory.iterdir():
        file.unlink()
    (directory / "config.json").write_text(json.dumps(config))
    if quantization:
        (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    tensors = {
        name: torch.ones(tensor.shape, dtype=getattr(torch, tensor.dtype or stored))
        for name, tensor in checkpoint_tensors(read_model_config(directory)).items()
        if has_optional or not tensor.is_optional
    }
    save_file(tensors, directory / "model.safetensors")
    return read_model_config(directory)


def _held_bytes(weights: object) -> int:
    """Of every storage that ``weights`` keeps alive, through dataclasses, closures and containers."""
    found: dict[int, int] = {}
    for tensor in _tensors(weights, set()):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _tensors(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, FunctionType):
        yield from _tensors(value.__closure__, seen)
    elif isinstance(value, (list, tuple, dict, CellType)) or type(value).__module__.startswith("trtx."):
        for inner in gc.get_referents(value):
            yield from _tensors(inner, seen)


@settings(
    max_examples=examples(60),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    drawn=checkpoints(),
    stored=st.sampled_from(DTYPES),
    asked=st.sampled_from(("auto", "auto", *DTYPES)),
    cache=st.sampled_from(("auto", "auto", "fp8", "bfloat16")),
    sizes=st.sampled_from((RankSizes(), RankSizes(), RankSizes(2), RankSizes(2, 2))),
)
def test_planned_memory_is_what_the_runner_takes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    drawn: tuple[dict[str, Any], dict[str, Any], bool],
    stored: str,
    asked: str,
    cache: str,
    sizes: RankSizes,
) -> None:
    whole = _write(tmp_path, *drawn, stored)
    try:
        check_ranks(whole, sizes)
    except UsageError:  # blocks of a quantized format that two ranks would cut, or a dense model
        sizes = RankSizes()
    split = RankSplit(FirstOf(sizes.ranks), whole, sizes) if sizes.ranks > 1 else None
    config = whole if split is None else split.config
    algorithm = config.quantization.algorithm if config.quantization else None
    values = LIMITS | {"dtype": asked, "kv_cache_config": {"dtype": cache}, "tensor_parallel_size": sizes.ranks}
    values["moe_expert_parallel_size"] = sizes.expert_ranks
    for device in DEVICES:
        dtype = torch_engine.compute_dtype(asked, config.dtype, is_gpu=device.is_gpu)
        try:
            kv_dtype = torch_engine.kv_dtype(cache, config.quantization, dtype, device.capability)
        except UsageError as refusal:
            assert device.name.startswith("A100")
            with pytest.raises(UsageError) as planned:
                plan_memory(tmp_path, "agg", values, engine="torch", device=device)
            assert str(planned.value) == str(refusal)
            continue
        plan = plan_memory(tmp_path, "agg", values, engine="torch", device=device)
        weights = load_weights(
            tmp_path, config, device=torch.device("cpu"), dtype=getattr(torch, dtype),
            scaled_products=products_of(device.capability, dtype), split=split,
        )  # fmt: skip
        held = _held_bytes(weights)
        assert plan.weight_bytes == held, (
            f"{algorithm} on {device.name}: planned {plan.weight_bytes} bytes of weights, held {held}; what stays "
            "beside a dequantized weight is `stays` of the format's row in trtx/checkpoint/formats.py, what is not "
            "quantized is listed in trtx/checkpoint/dense.py, and trtx/memory/torch_engine.py adds both up"
        )
        geometry = KvGeometry.uniform(config.num_layers, config.num_kv_heads, config.head_dim, 32, kv_dtype)
        assert plan.kv_bytes_per_token * 32 == geometry.block_bytes
        assert plan.capacity_blocks == _runner_blocks(monkeypatch, tmp_path, config, geometry, dtype, device, plan)


@pytest.mark.parametrize("max_tokens", [None, 1000])
@pytest.mark.parametrize(("layers", "full"), [(1, 0), (7, 2), (11, 1), (13, 4), (24, 9)])
def test_planned_kv_of_windows_is_what_groups_of_layers_take(
    tmp_path: Path, layers: int, full: int, max_tokens: int | None
) -> None:
    """Padding too, which blocks of one shape have where layers of one window are no multiple of what they hold."""
    (tmp_path / "config.json").write_text(json.dumps(_windowed(layers, full)))
    values = LIMITS | {"kv_cache_config": {"max_tokens": max_tokens}}
    plan = plan_memory(tmp_path, "agg", values, engine="torch", device=HOST)
    args = RunnerArgs(model_dir=tmp_path, device="cpu", max_tokens=max_tokens, **LIMITS)
    with closing(create_runner(args)) as runner:
        groups = len(runner.geometry.groups)
        assert plan.kv_bytes_per_token * 32 == groups * runner.geometry.block_bytes
        assert plan.capacity_blocks == runner.num_blocks // groups
        assert plan.pool_bytes == runner.pool.nbytes


@given(st.lists(st.sampled_from((None, 8, 16, 128)), min_size=1, max_size=80))
def test_the_plan_groups_layers_as_the_engine_does(windows: list[int | None]) -> None:
    groups = layer_groups(windows, 2, 16)
    assert torch_engine.block_layers(windows) == KvGeometry(groups, 32, "float32").block_layers
    assert torch_engine.padding_layers(windows) == len(groups) * torch_engine.block_layers(windows) - len(windows)


def _windowed(layers: int, full: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 48, "hidden_size": 32,
        "intermediate_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "torch_dtype": "float32",
        "use_sliding_window": True, "sliding_window": 8, "max_window_layers": full,
        "trtx_synthetic": {"seed": 1, "init_std": 0.02},
    }  # fmt: skip


def _runner_blocks(
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    config: ModelConfig,
    geometry: KvGeometry,
    dtype: str,
    device: MemoryDevice,
    plan: Any,
) -> int:
    """The runner asks CUDA what is free once the weights are there: it is told the plan's figure."""
    free = plan.total_bytes - plan.context_bytes - plan.weight_bytes
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, plan.total_bytes))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: device.capability)
    return kv_sizing.num_kv_blocks(
        RunnerArgs(model_dir=path, **LIMITS),
        config,
        geometry,
        device=torch.device("cuda", 0) if device.is_gpu else torch.device("cpu"),
        dtype=getattr(torch, dtype),
    )


@pytest.mark.parametrize("name", ["activation_bytes", "pool_room", "cpu_pool_room", "RESERVE_BYTES"])
def test_the_runner_has_no_formula_of_its_own(name: str) -> None:
    assert getattr(kv_sizing, name) is getattr(torch_engine, name), (
        f"runner/kv_sizing.py has a {name} of its own: the plan would count otherwise; use trtx.memory.torch_engine's"
    )


def test_a_model_that_the_runner_refuses_is_refused_by_the_plan_in_the_same_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_R1))
    with pytest.raises(UsageError, match="DeepseekV3ForCausalLM is not known to the torch engine") as planned:
        plan_memory(tmp_path, "agg", {}, engine="torch", device=HOST)
    with pytest.raises(UsageError) as refused:
        create_runner(RunnerArgs(model_dir=tmp_path, device="cpu"))
    assert str(planned.value) == str(refused.value)
