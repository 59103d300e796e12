"""Which numbers of ranks a model can be split over, and the shape of a rank's share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trtx.checkpoint import resolve_checkpoint
from trtx.checkpoint.model_config import ModelConfig, read_model_config
from trtx.checkpoint.tensor_parallel import RankSizes, check_expert_sizes, check_ranks, rank_config
from trtx.errors import UsageError


def shape(directory: Path, **changes: Any) -> ModelConfig:
    config = json.loads((resolve_checkpoint("synthetic:tiny").path / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    return read_model_config(directory)


@pytest.mark.parametrize(
    ("changes", "ranks", "says"),
    [
        ({}, 3, "does not divide the model's 8 attention heads; expected 1, 2, 4 or 8"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            4,
            "does not divide the model's 6 KV heads; expected 1, 2, 3 or 6",
        ),
        ({"intermediate_size": 771}, 2, "does not divide the 771 columns of the model's MLP; expected 1"),
    ],
)
def test_a_number_of_ranks_that_does_not_divide_is_refused_with_those_that_do(
    changes: dict[str, Any], ranks: int, says: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as refused:
        check_ranks(shape(tmp_path, **changes), RankSizes(ranks))
    assert str(refused.value) == f"tensor_parallel_size is {ranks}, which {says}"


def test_columns_of_experts_must_divide_and_those_of_an_absent_mlp_need_not() -> None:
    config = read_model_config(resolve_checkpoint("synthetic:tiny-moe").path)
    check_ranks(config, RankSizes(4))
    with pytest.raises(UsageError, match="the model's 4 attention heads"):
        check_ranks(config, RankSizes(8))


@pytest.mark.parametrize(
    ("ranks", "moe_tensor", "moe_expert", "expert_ranks"),
    [(4, None, None, 1), (4, -1, 2, 2), (4, 2, None, 2), (4, 1, -1, 4), (4, 4, 1, 1), (1, 1, 1, 1), (2, None, 2, 2)],
)
def test_sizes_of_experts_follow_from_each_other(
    ranks: int, moe_tensor: int | None, moe_expert: int | None, expert_ranks: int
) -> None:
    assert RankSizes.of(ranks, moe_tensor, moe_expert) == RankSizes(ranks, expert_ranks)


@pytest.mark.parametrize(
    ("ranks", "moe_tensor", "moe_expert", "sizes"),
    [(4, 2, 4, "2 x 4"), (4, None, 3, "1 x 3"), (4, 3, None, "3 x 1"), (1, None, 2, "1 x 2"), (2, 8, None, "8 x 1")],
)
def test_sizes_of_experts_that_do_not_multiply_to_the_ranks_are_refused(
    ranks: int, moe_tensor: int | None, moe_expert: int | None, sizes: str
) -> None:
    with pytest.raises(UsageError, match=f"is {sizes}, and tensor_parallel_size is {ranks}; expected a product of"):
        RankSizes.of(ranks, moe_tensor, moe_expert)


def test_each_expert_is_held_by_as_many_ranks_as_split_its_columns() -> None:
    config = read_model_config(resolve_checkpoint("synthetic:tiny-moe").path)
    assert config.experts is not None
    sizes = RankSizes(4, 2)
    shares = [rank_config(config, sizes, rank).experts for rank in range(4)]
    half, width = config.experts.count // 2, config.experts.intermediate_size // 2
    assert [(share.own.start, len(share.own), share.intermediate_size) for share in shares if share] == [
        (0, half, width), (half, half, width), (0, half, width), (half, half, width),
    ]  # fmt: skip
    assert [sizes.expert_part(rank) for rank in range(4)] == [0, 0, 1, 1]


def test_ranks_of_experts_must_divide_experts_that_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="moe_expert_parallel_size is 2, and this Qwen3ForCausalLM has no experts"):
        check_ranks(shape(tmp_path), RankSizes(2, 2))
    source = resolve_checkpoint("synthetic:tiny-moe").path
    changes = {"num_experts": 6, "num_experts_per_tok": 2}
    config = json.loads((source / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="which does not divide the model's 6 experts; expected 1, 2, 3 or 6"):
        check_ranks(read_model_config(tmp_path), RankSizes(4, 4))


@pytest.mark.parametrize(
    ("moe_tensor", "moe_expert", "says"),
    [(2, None, "moe_tensor_parallel_size is 2"), (-1, 1, "moe_expert_parallel_size is 1"), (4, 1, "moe_tensor")],
)
def test_sizes_of_experts_are_refused_for_a_model_that_has_none(
    tmp_path: Path, moe_tensor: int | None, moe_expert: int | None, says: str
) -> None:
    with pytest.raises(UsageError, match=f"^{says}.*this Qwen3ForCausalLM has no experts; leave it out"):
        check_expert_sizes(shape(tmp_path), moe_tensor, moe_expert)


def test_sizes_of_experts_may_be_stated_for_a_model_that_has_some_and_left_out_for_any(tmp_path: Path) -> None:
    check_expert_sizes(read_model_config(resolve_checkpoint("synthetic:tiny-moe").path), 1, 1)
    check_expert_sizes(shape(tmp_path), None, -1)


def test_a_model_that_takes_images_is_refused() -> None:
    with pytest.raises(UsageError, match="takes images, which the torch engine computes on one GPU; use --tp 1"):
        check_ranks(read_model_config(resolve_checkpoint("synthetic:tiny-vl").path), RankSizes(2))


def test_blocks_of_a_quantized_weight_are_not_cut(tmp_path: Path) -> None:
    quantization = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantization))
    config = shape(tmp_path, intermediate_size=96, head_dim=32)
    check_ranks(config, RankSizes(2))
    with pytest.raises(UsageError, match=r"does not divide the blocks of .*down_proj.*, which is quantized to NVFP4"):
        check_ranks(config, RankSizes(4))


def test_with_more_ranks_than_kv_heads_each_rank_has_one(tmp_path: Path) -> None:
    share = rank_config(shape(tmp_path), RankSizes(4))
    assert (share.num_heads, share.num_kv_heads, share.intermediate_size) == (2, 1, 192)


@pytest.mark.parametrize(
    ("changes", "ranks", "module"),
    [
        ({"intermediate_size": 1024}, 2, None),
        ({"intermediate_size": 1024}, 4, None),  # two KV heads: pairs of ranks have the same one
        ({"intermediate_size": 768}, 4, "mlp.gate_proj"),  # 192 rows each
        (
            {"intermediate_size": 160},
            2,
            "mlp.gate_proj",
        ),  # two blocks and 80 rows each: as many blocks, in other places
        (
            {"intermediate_size": 128},
            2,
            "mlp.gate_proj",
        ),  # one block, whose columns in down_proj share an input's scale
        ({"head_dim": 64}, 2, "self_attn.k_proj"),
    ],
)
@pytest.mark.parametrize("algorithm", ["FP8_BLOCK_SCALES", "FP8_PB_WO"])
def test_blocks_of_float8_are_not_cut(
    changes: dict[str, Any], ranks: int, module: str | None, algorithm: str, tmp_path: Path
) -> None:
    quantization = {"quant_algo": algorithm, "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    config = shape(tmp_path, **{"head_dim": 128, "intermediate_size": 512} | changes)
    if module is None:
        check_ranks(config, RankSizes(ranks))
        return
    cut = rf"which does not divide the blocks of model\.layers\.0\.{module}\.weight, which is quantized to {algorithm}"
    with pytest.raises(UsageError, match=cut):
        check_ranks(config, RankSizes(ranks))
