"""Models with attention windows on a GPU: engines, CUDA graphs, freed blocks, drafts, and the deterministic mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_player import Engine, assert_equal, served, workload
from kernel_cases import close, random
from runner_player import Player, build, random_prompt, reference_tokens, save
from test_deterministic_cuda import check, expected
from test_ragged_attention import RAGGED, Case, decodes
from test_runner_windows import LENGTHS, MODELS, poison_freed_blocks, serve_shared_prompts
from test_speculation_tokens import always, knowing
from transformers import PreTrainedModel

from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner
from trtx.torch_engine.runner.kernels import Attention, PassInputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
DEVICE = "cuda"


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    family, changes, windows = MODELS[request.param]
    built = build(family, **changes)
    built.windows = windows
    return built


@pytest.fixture(scope="module")
def model_dir(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("checkpoint"))


def new_runner(model_dir: Path, **changes: Any) -> TorchRunner:
    values: dict[str, Any] = {
        "device": DEVICE, "dtype": "float32", "tokens_per_block": 4, "max_tokens": 2048, "max_batch_size": 16,
    } | changes  # fmt: skip
    return create_runner(RunnerArgs(model_dir=model_dir, **values))


def test_greedy_tokens_of_a_mixed_batch_equal_transformers(model: PreTrainedModel, model_dir: Path) -> None:
    prompts = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    wanted = [reference_tokens(model, prompt, 24) for prompt in prompts]
    one = new_runner(model_dir)
    assert one.geometry.windows == model.windows
    for chunk in (10_000, 7):
        player = Player(one)
        assert player.finish([player.add(prompt, room=24) for prompt in prompts], 24, chunk=chunk) == wanted
    one.close()


@pytest.mark.parametrize("graphs", [False, True])
def test_an_engines_tokens_in_float32_are_the_cpus(model_dir: Path, graphs: bool) -> None:
    crowded: dict[str, Any] = {"tokens_per_block": 8, "num_blocks": 66, "max_batch_size": 5, "max_tokens": None}
    on_cpu = new_runner(model_dir, **crowded | {"device": "cpu"})
    one = new_runner(model_dir, **crowded, cuda_graphs=graphs, merges_passes=True, pass_sizes=(3, 16, 40))
    for seed in range(2):
        wishes = workload(seed)
        wanted, _ = served(on_cpu, wishes, overlap=False)
        assert_equal(served(one, wishes, overlap=True)[0], wanted, wishes)
        drafts = always(knowing(wishes, wanted), is_asynchronous=True)
        assert_equal(served(one, wishes, overlap=True, speculation=drafts)[0], wanted, wishes)
        assert sum(drafts.take_counts().accepted)
    one.close()


def test_blocks_that_leave_the_window_are_freed_and_never_read(model: PreTrainedModel, model_dir: Path) -> None:
    """A freed block holds NaN until another sequence writes into it."""
    one = new_runner(model_dir, max_tokens=None, num_blocks=26 * len(model.windows))
    engine = Engine(one, overlap=True)
    freed = poison_freed_blocks(engine, one)
    prompts = serve_shared_prompts(engine)
    assert freed
    for index, prompt in enumerate(prompts):
        assert engine.answers[index].tokens == reference_tokens(model, prompt, 40)
    one.close()


@pytest.mark.parametrize("kind", [("float32", "auto"), ("bfloat16", "fp8")])
def test_deterministic_answers_are_those_of_the_request_alone_to_the_bit(kind: tuple[str, str], tmp_path: Path) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 1200, "max_position_embeddings": 1024, "head_dim": 64}
    model_dir = save(build("mistral", sliding_window=70, **shape), tmp_path)
    one = new_runner(
        model_dir, dtype=kind[0], kv_dtype=kind[1], tokens_per_block=8, max_tokens=None, num_blocks=2000,
        max_batch_size=70, deterministic=True,
    )  # fmt: skip
    check(one, expected(one))
    one.close()


@pytest.mark.parametrize("window", [100, 4096])
@pytest.mark.parametrize("attention", RAGGED)
def test_a_graph_takes_new_lengths_and_long_contexts_equal_torch(attention: Attention, window: int) -> None:
    shape = (32, 8, 128)
    case = Case([(20_000, 1), *[(640, 1)] * 30, (3, 1)], heads=shape, dtype=torch.bfloat16, window=window)
    full = decodes(case)
    inputs = PassInputs(
        full.token_ids, torch.zeros_like(full.positions), torch.full_like(full.slots, case.cache.padding_slot)
    )
    q = random(32, *shape[::2], dtype=torch.bfloat16)
    kernels = case.triton(attention)

    def run() -> torch.Tensor:
        attended: torch.Tensor = kernels.attend(q, 1, kernels.planned(inputs, q.dtype))
        return attended

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    inputs.positions.copy_(full.positions)
    inputs.slots.copy_(full.slots)
    graph.replay()
    close(out, case.expected(q, full))
    long = Case([(31_000, 600), (0, 300), (32_000, 1), (9_000, 16)], shape, torch.bfloat16, window=window)
    q = long.queries()
    close(long.attend(attention, q, long.inputs), long.expected(q, long.inputs))
