"""Runners of a group use one copy of the weights, give the bits of a copy of their own, and check what they map."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_export import export
from runner_player import Player, build, random_prompt, save

from trtx.checkpoint.model_config import read_model_config
from trtx.errors import UsageError
from trtx.torch_engine.llm_args import WeightGroup
from trtx.torch_engine.llmapi.sampling import SamplingParams
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner
from trtx.torch_engine.runner.scaled_linear import ScaledLinear
from trtx.torch_engine.runner.weight_offer import PlacedTensor, WeightOffer, placed
from trtx.torch_engine.runner.weight_tensors import named_weights
from trtx.torch_engine.runner.weights import DecoderWeights, load_weights

PROMPTS = [random_prompt(length, length) for length in (3, 20, 41)]
CPU, META = torch.device("cpu"), torch.device("meta")


def runner(directory: Path, group: Path | None, name: str = "a", **changes: Any) -> TorchRunner:
    values: dict[str, Any] = {"tokens_per_block": 8, "max_tokens": 1024, "max_batch_size": 4} | changes
    shared = None if group is None else WeightGroup(directory=str(group), name=name)
    return create_runner(RunnerArgs(model_dir=directory, device="cpu", weight_group=shared, **values))


def logprobs(one: TorchRunner) -> list[list[Any]]:
    """Greedy tokens with their log-probabilities, so that each weight counts."""
    player = Player(one)
    playing = [player.add(prompt, room=8, sampling=SamplingParams(logprobs=2)) for prompt in PROMPTS]
    player.finish(playing, 8)
    return [[result.logprobs for result in each.results] for each in playing]


def source(one: TorchRunner) -> str | None:
    shared = one.shared_weights
    assert shared is not None
    return shared.mapped_from


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3"), tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture
def group(tmp_path: Path) -> Path:
    return tmp_path / ("a directory whose name is longer than the address of a socket may be" * 2) / "group"


def check_shared(directory: Path, group: Path, **changes: Any) -> None:
    with closing(runner(directory, None, **changes)) as own:
        expected = logprobs(own)
        assert own.shared_weights is None
    first = runner(directory, group, "first", **changes)
    with closing(runner(directory, group, "second", **changes)) as second:
        assert (source(first), source(second)) == (None, "first")
        assert first.shared_weights and second.shared_weights
        assert first.shared_weights.num_bytes == second.shared_weights.num_bytes > 0
        assert logprobs(first) == logprobs(second) == expected
        first.close()
        assert logprobs(second) == expected, "the memory went with the runner that loaded it"
        with closing(runner(directory, group, "first", **changes)) as again:
            assert source(again) == "second"
            assert logprobs(again) == expected
    with closing(runner(directory, group, "second", **changes)) as alone:
        assert source(alone) is None, "a closed runner answers"


@pytest.mark.parametrize(
    "family",
    ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen3_moe", "gpt_oss", "gemma3"))],
)
def test_the_second_runner_maps_the_weights_and_keeps_them_when_the_first_is_gone(
    family: str, tmp_path: Path, group: Path
) -> None:
    check_shared(save(build(family), tmp_path / "model"), group)


def test_a_deterministic_runner_tests_its_backend_with_the_mapped_weights(checkpoint: Path, group: Path) -> None:
    check_shared(checkpoint, group, deterministic=True)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["FP8", "W4A16_AWQ", "NVFP4", "W8A8_SQ_PER_CHANNEL", "FP8_BLOCK_SCALES"])
def test_dequantized_weights_are_mapped_with_the_scales_of_their_inputs(
    algorithm: str, tmp_path: Path, group: Path
) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    export(build("qwen3"), algorithm, directory)
    check_shared(directory, group)


def test_runners_whose_weights_differ_load_a_copy_each_and_say_why(
    checkpoint: Path, group: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build("qwen3")
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.flip(0))
    other = save(model, tmp_path / "other")
    with closing(runner(checkpoint, group, "first")):
        for directory, dtype, because in (
            (checkpoint, "bfloat16", "because its dtype is float32, and bfloat16 here; it loads a copy"),
            (other, "auto", "because its checkpoint is "),
        ):
            caplog.clear()
            with closing(runner(directory, group, "second", dtype=dtype)) as second:
                assert source(second) is None
                assert f"second does not use the weights of first, {because}" in caplog.text
        with closing(runner(checkpoint, group, "third")) as third:
            assert source(third) == "first"


def test_shared_weights_are_not_updated_in_place(checkpoint: Path, group: Path) -> None:
    with closing(runner(checkpoint, group)) as one:
        expected = logprobs(one)
        with pytest.raises(UsageError, match="the weights are shared with other engines.*or without --share-weights"):
            one.update_weights(checkpoint)
        assert logprobs(one) == expected


def test_a_file_is_not_a_directory_for_a_group(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="can't be used to share weights .*; give a directory that can be written"):
        runner(checkpoint, tmp_path / "file")


def test_a_directory_that_others_may_write_to_holds_no_group(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UsageError, match="other users may write to .*; give a directory that only you may write to"):
        runner(checkpoint, tmp_path / "open")


def test_a_second_engine_of_the_same_name_is_refused_and_the_first_still_shares(checkpoint: Path, group: Path) -> None:
    with closing(runner(checkpoint, group, "first")):
        with pytest.raises(UsageError, match="name first shares its weights in .* already; give each engine"):
            runner(checkpoint, group, "first")
        with closing(runner(checkpoint, group, "second")) as second:
            assert source(second) == "first"


@pytest.fixture
def liar(group: Path) -> Iterator[socket.socket]:
    """A listening socket under the name of an engine."""
    group.mkdir(parents=True)
    there = os.open(group, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{there}/first.sock")
        os.close(there)
        listener.listen()
        yield listener


@pytest.mark.parametrize("said", [b"", b"\x03\x00\x00\x00abc", b"\xff\xff\xff\x7f"], ids=["nothing", "noise", "less"])
def test_an_engine_that_breaks_off_is_not_waited_for(
    said: bytes, checkpoint: Path, group: Path, liar: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    def answer() -> None:
        connection, _ = liar.accept()
        with connection:
            connection.sendall(said)

    thread = threading.Thread(target=answer)
    thread.start()
    with closing(runner(checkpoint, group, "second")) as second:
        assert source(second) is None
    thread.join()
    told = "the weights of first are not used, because it is stopped or has just ended" in caplog.text
    assert told == (said[4:] != b"abc")  # noise: no engine's socket


def test_the_socket_of_a_killed_engine_is_replaced(checkpoint: Path, group: Path, liar: socket.socket) -> None:
    liar.close()
    with closing(runner(checkpoint, group, "second")) as second, closing(runner(checkpoint, group, "first")) as first:
        assert (source(second), source(first)) == (None, "second")


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> tuple[DecoderWeights, DecoderWeights]:
    """Weights, and the same without values."""
    config = read_model_config(checkpoint)
    real, expected = (
        load_weights(checkpoint, config, device=device, dtype=torch.float32, scaled_products=frozenset(), copied_to=CPU)
        for device in (CPU, META)
    )
    return real, expected


def offered(weights: DecoderWeights, **changes: Any) -> WeightOffer:
    tensors = {name: placed(tensor, 0, 0) for name, tensor in named_weights(weights).items()}
    return WeightOffer({"dtype": "float32"}, (1 << 62,), tensors | changes)


@pytest.mark.parametrize(
    ("name", "changes", "because"),
    [
        ("final_norm", {"shape": (65,)}, r"its final_norm is float32 \[65\], and float32 \[64\] here"),
        ("final_norm", {"dtype": "bfloat16"}, r"its final_norm is bfloat16 \[64\], and float32 \[64\] here"),
        ("final_norm", {"stride": (-1,)}, "its final_norm is "),
        ("final_norm", {"region": 1}, "its final_norm lies outside its memory"),
        ("final_norm", {"region": -1}, "its final_norm lies outside its memory"),
        ("final_norm", {"offset": (1 << 62) - 255}, "its final_norm lies outside its memory"),
        ("final_norm", {"offset": -4}, "its final_norm lies outside its memory"),
        ("final_norm", {"offset": 2}, "its final_norm lies outside its memory"),
        ("final_norm", {"stride": (1 << 60,)}, "its final_norm lies outside its memory"),
        ("more", {}, r"its more is float32 \[64\], and missing here"),
    ],
)
def test_a_tensor_that_is_another_or_lies_elsewhere_is_refused(
    name: str, changes: dict[str, Any], because: str, loaded: tuple[DecoderWeights, DecoderWeights]
) -> None:
    real, expected = loaded
    assert offered(real).mismatch({"dtype": "float32"}, expected) is None
    norm = placed(real.final_norm, 0, 0)
    values = {field: getattr(norm, field) for field in PlacedTensor.__struct_fields__} | changes
    problem = offered(real, **{name: PlacedTensor(**values)}).mismatch({"dtype": "float32"}, expected)
    assert problem is not None
    assert re.match(because, problem)


def test_a_missing_tensor_is_refused(loaded: tuple[DecoderWeights, DecoderWeights]) -> None:
    real, expected = loaded
    offer = offered(real)
    del offer.tensors["final_norm"]
    assert offer.mismatch({"dtype": "float32"}, expected) == "its final_norm is missing, and float32 [64] here"
    assert offer.mismatch({}, expected) == "its dtype is float32, and – here"


@pytest.mark.parametrize("scales", [[2.0, 2.0, 2.0], [1.0, 2.0, 3.0]])
def test_a_float8_weight_has_one_scale_or_one_for_each_row_as_its_values_say(scales: list[float]) -> None:
    """Without values, a scale for each row is expected, and one scale is accepted."""

    def linear(device: torch.device) -> ScaledLinear:
        return ScaledLinear(
            weight=torch.zeros(3, 16, device=device).to(torch.float8_e4m3fn),
            row_scales=torch.tensor(scales, device=device),
            input_scale=torch.tensor(0.5, device=device),
            bias=None,
            dtype=torch.bfloat16,
        )

    real, expected = linear(CPU), linear(META)
    tensors = named_weights(real)
    memory = torch.zeros(4096, dtype=torch.uint8)
    begin, places = 0, {}
    for name, tensor in tensors.items():
        places[name] = PlacedTensor(
            0, begin, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride())
        )
        copy = torch.empty(0, dtype=tensor.dtype)
        copy.set_(memory.untyped_storage(), begin // tensor.element_size(), tensor.shape, tensor.stride()).copy_(tensor)
        begin += 256
    offer = WeightOffer({}, (4096,), places)
    assert offer.mismatch({}, expected) is None  # type: ignore[arg-type]
    offer.place(expected, [memory])  # type: ignore[arg-type]
    assert expected._has_one_scale == real._has_one_scale == (len(set(scales)) == 1)
    assert torch.equal(expected._scales, real._scales) and torch.equal(expected._columns.float(), real._columns.float())
