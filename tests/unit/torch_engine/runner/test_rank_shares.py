"""A rank's share of a quantized weight, dequantized, is that share of the dequantized weight."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trtx.checkpoint import resolve_checkpoint
from trtx.checkpoint.dense import checkpoint_tensors
from trtx.checkpoint.formats import FORMATS, LOADED
from trtx.checkpoint.model_config import read_model_config
from trtx.checkpoint.tensor_parallel import RankSizes
from trtx.torch_engine.runner.formats import format_of
from trtx.torch_engine.runner.rank_split import RankSplit

pytestmark = pytest.mark.slow

QUERIES, KEYS, OUTPUT = (f"model.layers.0.self_attn.{name}_proj" for name in "qko")


class OneOf:
    """A :class:`RankGroup` whose other ranks are never asked."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def add(self, partial: Tensor) -> Tensor:
        raise NotImplementedError

    def join(self, part: Tensor) -> Tensor:
        raise NotImplementedError

    def share(self, value: Tensor) -> None:
        raise NotImplementedError

    def smallest(self, number: int) -> int:
        raise NotImplementedError


def random_like(shape: tuple[int, ...], dtype: str | None) -> Tensor:
    if dtype in ("uint8", "int8"):
        return torch.randint(0, 100, shape, dtype=getattr(torch, dtype))
    return (torch.rand(shape) + 0.5).to(getattr(torch, dtype or "float32"))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("algorithm", sorted(LOADED))
def test_shares_of_a_weight_are_rows_or_columns_of_it(algorithm: str, ranks: int, tmp_path: Path) -> None:
    source = resolve_checkpoint("synthetic:tiny").path
    stated = json.loads((source / "config.json").read_text())
    if FORMATS[algorithm].is_blocked:  # heads of whole blocks: others can't be split
        stated["head_dim"] = 128
    (tmp_path / "config.json").write_text(json.dumps(stated))
    group = 128 if FORMATS[algorithm].is_blocked else 32
    quantization = {"quant_algo": algorithm, "group_size": group, "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    config = read_model_config(tmp_path)
    assert config.quantization is not None
    form = format_of(config.quantization)
    torch.manual_seed(0)
    whole = {
        name: random_like(tensor.shape, tensor.dtype)
        for name, tensor in checkpoint_tensors(config).items()
        if name.startswith((QUERIES, KEYS, OUTPUT))
    }

    def weight(tensors: dict[str, Tensor], module: str) -> Tensor:
        prefix = f"{module}."
        return form.dequantize({name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)})

    for rank in range(ranks):
        own = dict(RankSplit(OneOf(rank, ranks), config, RankSizes(ranks)).share(iter(whole.items())))
        assert torch.equal(weight(own, QUERIES), weight(whole, QUERIES).chunk(ranks, dim=0)[rank])
        assert torch.equal(weight(own, OUTPUT), weight(whole, OUTPUT).chunk(ranks, dim=1)[rank])
        assert torch.equal(weight(own, KEYS), weight(whole, KEYS).chunk(2, dim=0)[rank * 2 // ranks])
