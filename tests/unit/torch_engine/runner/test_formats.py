"""Each quantized format against numbers worked out by hand, and against what ModelOpt computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trtx.checkpoint.formats import FORMATS as STORED
from trtx.checkpoint.formats import LOADED
from trtx.torch_engine.runner.formats import (
    FORMATS,
    Fp8,
    Fp8Blocks,
    Fp8PerChannel,
    Fp8WeightBlocks,
    Int4Awq,
    Int8SmoothQuant,
    Nvfp4,
    shared_input_scale,
)
from trtx.torch_engine.runner.fp8 import FP8, to_fp8

GOLDEN = load_file(Path(__file__).parent / "golden" / "modelopt.safetensors")
COMPRESSED = load_file(Path(__file__).parent / "golden" / "compressed_tensors.safetensors")
PRESETS = {"FP8": "FP8", "FP8_DYNAMIC": "FP8_PER_CHANNEL_PER_TOKEN", "FP8_BLOCK": "FP8_BLOCK_SCALES"}
FROM_MODELOPT = [algorithm for algorithm in LOADED if algorithm != "FP8_BLOCK_SCALES"]  # which ModelOpt does not export


@pytest.mark.parametrize("algorithm", FROM_MODELOPT)
def test_a_module_that_modelopt_exported_gives_what_modelopt_computed(algorithm: str) -> None:
    part = {
        name.removeprefix(f"{algorithm}/"): tensor
        for name, tensor in GOLDEN.items()
        if name.startswith(f"{algorithm}/")
    }
    assert part, (
        f"golden/modelopt.safetensors has no module in {algorithm}: name ModelOpt's config for it in CONFIGS of "
        "golden/make_modelopt.py, and run that"
    )
    assert algorithm in FORMATS, f"{algorithm}: add its class to FORMATS of trtx/torch_engine/runner/formats.py"
    x, y = part.pop("x"), part.pop("y")
    module = FORMATS[algorithm]()
    layout = STORED[algorithm].layout(32, 128, 128)
    assert part.keys() == layout.keys()
    for name, stored in layout.items():
        assert stored.misfit(tuple(part[name].shape), str(part[name].dtype).removeprefix("torch.")) is None
        part[name] = part[name].reshape(stored.shape)
    prepare = module.prepare([part])
    ours = (x if prepare is None else prepare(x)) @ module.dequantize(part).T
    # Of values that lie exactly between two, ModelOpt rounds some the other way: it multiplies by 1 / scale.
    torch.testing.assert_close(ours, y, rtol=1e-4, atol=1e-4 * float(y.abs().max()))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_module_of_compressed_tensors_gives_what_it_computed(preset: str) -> None:
    part = {
        name.removeprefix(f"{preset}/"): tensor for name, tensor in COMPRESSED.items() if name.startswith(f"{preset}/")
    }
    x, y = part.pop("x"), part.pop("y")
    if preset == "FP8_DYNAMIC":
        part["weight_scale"] = part["weight_scale"][:, 0]  # as the runner loads [rows, 1]
    module = FORMATS[PRESETS[preset]]()
    prepare = module.prepare([part])
    assert prepare is not None
    torch.testing.assert_close(prepare(x) @ module.dequantize(part).T, y, rtol=1e-5, atol=1e-5 * float(y.abs().max()))


def test_scales_of_rows_multiply_rows_and_each_token_has_its_own() -> None:
    part = {"weight": torch.tensor([[1.0, -0.5], [448.0, 2**-9]]).to(FP8), "weight_scale": torch.tensor([0.5, 3.0])}
    assert Fp8PerChannel().dequantize(part).tolist() == [[0.5, -0.25], [1344.0, 3 * 2**-9]]
    x = torch.tensor([[448.0, 2.13, -100.0], [896.0, 2.13, -100.0], [0.0, 0.0, 0.0]])
    # With the scales 1 and 2: 2.13 lies between 2 and 2.25, and 1.065 between 1 and 1.125; 100 between 96 and 104.
    assert Fp8PerChannel().prepare([part])(x).tolist() == [[448.0, 2.25, -96.0], [896.0, 2.25, -96.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scales_of_blocks_multiply_blocks_also_where_the_last_is_smaller(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight = torch.randn(200, 300).to(FP8)
    scale = torch.tensor([[1.0, 2.0, 0.5], [4.0, 8.0, 0.25]])
    expected = weight.float()
    for row in range(200):
        for column in range(300):
            expected[row, column] *= scale[row // 128, column // 128]
    for name in ("weight_scale_inv", "weight_scale"):
        assert torch.equal(Fp8Blocks().dequantize({"weight": weight, name: scale}), expected)
    assert torch.equal(
        Fp8WeightBlocks().dequantize({"weight": weight, "weight_scale": scale[:, None, :, None]}), expected
    )
    assert Fp8WeightBlocks().prepare([]) is None
    narrow = {"weight": weight[:, :100], "weight_scale_inv": scale[:, :1]}
    assert torch.equal(Fp8Blocks().dequantize(narrow), expected[:, :100])
    # An input: 128, 128 and 44 columns have the scales 1, 2 and 4. 2.2, 1.1 and 0.55 become 2.25, 1.125 and 0.5625.
    x = torch.full((2, 300), 2.2)
    x[0, ::128] = torch.tensor([448.0, -896.0, 1792.0])
    x[1] = 0.0
    rounded = Fp8Blocks().prepare([])(x.to(dtype))
    assert rounded.dtype == dtype and rounded.is_contiguous()
    assert rounded[0, ::128].tolist() == [448.0, -896.0, 1792.0] and not rounded[1].any()
    assert {value for at, value in enumerate(rounded[0].tolist()) if at % 128} == {2.25}
    x[0, 256] *= 32  # 2.2 / 128 is 0.0171875, between 0.015625 and 0.017578125
    rounded = Fp8Blocks().prepare([])(x)
    assert set(rounded[0, 1:128].tolist()) == {2.25} and set(rounded[0, 257:].tolist()) == {0.017578125 * 128}


def test_fp8_values_saturate_and_keep_their_scale() -> None:
    part = {
        "weight": torch.tensor([[1.0, -0.5], [448.0, 2**-9]]).to(FP8),
        "weight_scale": torch.tensor(0.5), "input_scale": torch.tensor(2.0),
    }  # fmt: skip
    assert Fp8().dequantize(part).tolist() == [[0.5, -0.25], [224.0, 2**-10]]
    x = torch.tensor([[2.0, 896.0, 1e6, -1e6, 2.13]])
    assert Fp8().prepare([part])(x).tolist() == [[2.0, 896.0, 896.0, -896.0, 2.25]]
    assert to_fp8(x, torch.tensor(2.0)).dtype == FP8


def test_int4_unpacks_two_rows_a_byte_and_scales_groups() -> None:
    part = {
        "weight": torch.tensor([[0x21, 0xF7, 0x80, 0x08]], dtype=torch.uint8),  # row 0: 1 7 0 -8, row 1: 2 -1 -8 0
        "weight_scale": torch.tensor([[1.0, 10.0], [0.5, 2.0]]),
        "pre_quant_scale": torch.tensor([1.0, 1.0, 1.0, 3.0]),
    }
    assert Int4Awq(2).dequantize(part).tolist() == [[1.0, 7.0, 0.0, -240.0], [1.0, -0.5, -16.0, 0.0]]
    assert Int4Awq(2).prepare([part]) is None


def test_nvfp4_unpacks_two_columns_a_byte_and_scales_twice() -> None:
    codes = list(range(16)) + [7] + [15] * 15
    packed = torch.tensor([[low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)]])
    part = {
        "weight": packed.to(torch.uint8), "weight_scale": torch.tensor([[2.0, 0.5]]).to(FP8),
        "weight_scale_2": torch.tensor(0.25), "input_scale": torch.tensor(1.0),
    }  # fmt: skip
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    first = [0.5 * value for value in values] + [-0.5 * value for value in values]
    assert Nvfp4().dequantize(part).tolist() == [[*first, 0.75, *[-0.75] * 15]]


def test_nvfp4_rounds_an_input_to_the_nearest_code_ties_to_even() -> None:
    prepare = Nvfp4().prepare([{"input_scale": torch.tensor(1.0)}])
    block = [6.0, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, -0.25, -0.75, -2.6, -6.0, 0.0, 1.1]
    rounded = [6.0, 0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 0.0, -1.0, -3.0, -6.0, 0.0, 1.0]
    assert prepare(torch.tensor([block])).tolist() == [rounded]
    # A second block has its own scale, 12 / 6; and scales are float8: 13 / 6 = 2.1667 becomes 2.25.
    twice = torch.tensor([[2 * value for value in block] + [13.0] + [0.0] * 15])
    assert prepare(twice).tolist() == [[2 * value for value in rounded] + [13.5] + [0.0] * 15]
    assert prepare(torch.zeros(2, 16)).tolist() == torch.zeros(2, 16).tolist()


def test_int8_smooths_then_rounds_an_input() -> None:
    part = {
        "weight": torch.tensor([[1, -2], [127, -128]], dtype=torch.int8), "weight_scale": torch.tensor([0.5, 2.0]),
        "input_scale": torch.tensor(0.1), "pre_quant_scale": torch.tensor([1.0, 0.5]),
    }  # fmt: skip
    assert Int8SmoothQuant().dequantize(part).tolist() == [[0.5, -1.0], [254.0, -256.0]]
    prepared = Int8SmoothQuant().prepare([part, part])(torch.tensor([[0.12, 0.3], [100.0, -100.0]]))
    torch.testing.assert_close(prepared, torch.tensor([[0.1, 0.2], [12.7, -12.8]]))
    other = part | {"pre_quant_scale": torch.tensor([1.0, 1.0])}
    with pytest.raises(ValueError, match="pre_quant_scale differs"):
        Int8SmoothQuant().prepare([part, other])


def test_modules_of_one_input_share_the_largest_scale() -> None:
    assert shared_input_scale([{"input_scale": torch.tensor(value)} for value in (0.1, 0.3, 0.2)]).item() == (
        pytest.approx(0.3)
    )
