"""A float8 KV cache: what is stored, and that tokens do not depend on how a sequence got there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from examples import first_of
from quantized_export import export
from runner_player import FAMILIES, Player, build, random_prompt, save

from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner

pytestmark = pytest.mark.slow


def runner(directory: Path, **changes: Any) -> TorchRunner:
    values: dict[str, Any] = {"tokens_per_block": 8, "max_tokens": 2048, "max_batch_size": 8} | changes
    return create_runner(RunnerArgs(model_dir=directory, device="cpu", **values))


@pytest.fixture(params=first_of(2, sorted(FAMILIES, reverse=True)))
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save(build(request.param), tmp_path)


@pytest.fixture
def products_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a product then is the same whatever stands beside it, on every processor.

    In float32 its last bit may differ with the number of rows, and rounding to float8 makes 6 % of such a bit.
    """
    for name in ("linear", "scaled_dot_product_attention"):
        function = getattr(F, name)

        def exact(*args: Any, of: Any = function, **options: Any) -> torch.Tensor:
            wide = [one.double() if torch.is_tensor(one) else one for one in args]
            found: torch.Tensor = of(*wide, **options)
            return found.to(args[0].dtype)

        monkeypatch.setattr(F, name, exact)


def tokens(one: TorchRunner, *, chunk: int = 10_000) -> list[list[int]]:
    player = Player(one)
    return player.finish([player.add(random_prompt(length, length)) for length in (1, 7, 40, 90)], 20, chunk=chunk)


@pytest.mark.usefixtures("products_in_float64")
def test_tokens_do_not_depend_on_chunks_or_on_what_else_runs(directory: Path) -> None:
    expected = tokens(runner(directory, kv_dtype="fp8"))
    assert tokens(runner(directory, kv_dtype="fp8"), chunk=11) == expected
    alone = []
    for length in (1, 7, 40, 90):
        player = Player(runner(directory, kv_dtype="fp8"))
        alone += player.finish([player.add(random_prompt(length, length))], 20, chunk=3)
    assert alone == expected


@pytest.mark.usefixtures("products_in_float64")
def test_a_prefix_that_another_sequence_computed_gives_the_same_tokens(directory: Path) -> None:
    player, prompt = Player(runner(directory, kv_dtype="fp8")), random_prompt(43, 1)
    first = player.add(prompt)
    player.finish([first], 12)
    second = player.add(prompt)
    own, cached = ((one.block_ids, *one.more_blocks) for one in (second, first))
    for blocks, others in zip(own, cached, strict=True):
        blocks[:5] = others[:5]
    second.computed = 40
    assert player.finish([second], 12) == [first.output]


@pytest.mark.parametrize("kv_scales", [False, True])
def test_values_are_stored_divided_by_the_checkpoints_scales(tmp_path: Path, kv_scales: bool) -> None:
    export(build("qwen3"), "FP8", tmp_path, kv_scales=kv_scales)
    pools = []
    for kv_dtype in ("fp8", "float32"):
        one = runner(tmp_path, kv_dtype=kv_dtype, num_blocks=8)
        player = Player(one)
        player.step([player.add(random_prompt(40, 2), room=0)])
        pools.append(one.pool.float())
    quantized, exact = (pool[:, :, 0] for pool in pools)  # the first layer: later ones compute with what was rounded
    scale = torch.tensor([0.02, 0.007] if kv_scales else [1.0, 1.0]).view(2, 1, 1)
    inside = exact.clamp(-448 * scale, 448 * scale)
    torch.testing.assert_close(quantized * scale, inside, rtol=1 / 15, atol=float(scale.max()) * 2**-9)


def test_values_past_the_largest_saturate(tmp_path: Path) -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(1e4)
    one = runner(save(model, tmp_path), kv_dtype="fp8")
    assert all(0 <= token < one.vocab_size for sequence in tokens(one) for token in sequence)
    assert one.pool.float().isfinite().all() and one.pool.float().abs().max() == 448


def test_the_kv_dtype_follows_the_checkpoint_unless_it_is_given(tmp_path: Path) -> None:
    export(build("qwen3"), "FP8", tmp_path, kv_scales=True)
    automatic = runner(tmp_path, num_blocks=2)
    assert automatic.geometry.dtype == "float8_e4m3fn" and automatic.pool.dtype == torch.float8_e4m3fn
    assert automatic.geometry.block_bytes == automatic.pool[0].nbytes
    given = runner(tmp_path, num_blocks=2, kv_dtype="float32")
    assert given.geometry.dtype == "float32" and given.geometry.block_bytes == 4 * automatic.geometry.block_bytes


def test_engines_with_other_scales_do_not_share_kv(tmp_path: Path) -> None:
    export(build("qwen3"), "FP8", tmp_path / "scaled", kv_scales=True)
    export(build("qwen3"), "FP8", tmp_path / "plain")
    scaled, plain = (runner(tmp_path / name, num_blocks=2, kv_dtype="fp8").geometry for name in ("scaled", "plain"))
    assert scaled != plain and scaled == runner(tmp_path / "scaled", num_blocks=2).geometry
