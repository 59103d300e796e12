"""Pictures in the prefill pass, against transformers' whole LLaVA: tokens equal, however the work is cut up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_player import Engine
from seeing_player import IMAGE, ROWS, Oracle, Sight

from trtx.ipc.shared_tensor import SharedTensor, share
from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.core.scheduler_limits import SchedulerLimits
from trtx.torch_engine.handoff import KvTransport, create_transport
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.messages import Handoff, Submit
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner

pytestmark = pytest.mark.slow

COUNT = 12
SIGHTS = [
    Sight((4, "a", 5)), Sight((4, "b", 5)), Sight((3, "a", 2, "b", 1)), Sight(("c",)), Sight((1, "a", "b")),
    Sight((17,)),
]  # fmt: skip


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def expected(oracle: Oracle) -> list[list[int]]:
    answers = [oracle.tokens(sight, COUNT) for sight in SIGHTS]
    assert len({tuple(answer) for answer in answers}) == len(SIGHTS), "other pictures, other answers"
    return answers


def new_runner(oracle: Oracle, num_blocks: int = 80) -> TorchRunner:
    return create_runner(
        RunnerArgs(
            model_dir=oracle.directory, device="cpu", tokens_per_block=4, num_blocks=num_blocks, max_batch_size=6
        )
    )


@pytest.fixture(scope="module")
def runner(oracle: Oracle) -> TorchRunner:
    return new_runner(oracle)


def engine_of(
    runner: TorchRunner, oracle: Oracle, *, tokens: int = 64, puts: str = "abc", transport: KvTransport | None = None
) -> Engine:
    engine = Engine(runner, overlap=True, transport=transport)
    engine.core = EngineCore(runner, SchedulerLimits(6, tokens), transport=transport)
    oracle.put(engine, puts)
    return engine


def answers(engine: Engine, sights: list[Sight] = SIGHTS, first: int = 0) -> list[list[int]]:
    for index, sight in enumerate(sights):
        sight.submit(engine.core, first + index, COUNT)
    engine.finish()
    return [engine.answers[first + index].tokens for index in range(len(sights))]


@pytest.mark.parametrize("tokens", [*range(6, 16), 64])
def test_tokens_are_those_of_the_whole_model_wherever_a_prompt_is_cut(
    runner: TorchRunner, oracle: Oracle, expected: list[list[int]], tokens: int
) -> None:
    assert answers(engine_of(runner, oracle, tokens=tokens)) == expected


def test_tokens_are_the_same_from_the_prefix_cache(
    runner: TorchRunner, oracle: Oracle, expected: list[list[int]]
) -> None:
    engine = engine_of(runner, oracle)
    assert answers(engine) == expected
    reused = engine.core.scheduler.pool.counters.reused
    assert answers(engine, first=100) == expected
    whole = sum((len(sight.prompt) - 1) // 4 for sight in SIGHTS)
    assert engine.core.scheduler.pool.counters.reused - reused == whole


def test_tokens_are_the_same_after_preemption(oracle: Oracle, expected: list[list[int]]) -> None:
    engine = engine_of(new_runner(oracle, num_blocks=16), oracle)
    assert answers(engine) == expected
    assert engine.paused, "nothing was preempted"


@pytest.fixture
def transports(runner: TorchRunner, oracle: Oracle) -> Iterator[tuple[TorchRunner, list[KvTransport]]]:
    decode = new_runner(oracle)
    ends = [create_transport(one.pool, one.geometry, routes=["direct"]) for one in (runner, decode)]
    yield decode, ends
    for end in ends:
        end.close()


def test_tokens_are_the_same_over_a_handoff_to_an_engine_without_embeddings(
    runner: TorchRunner, oracle: Oracle, expected: list[list[int]], transports: Any
) -> None:
    decode_runner, (here, there) = transports
    prefill = engine_of(runner, oracle, transport=here)
    decode = engine_of(decode_runner, oracle, puts="", transport=there)
    for index, sight in enumerate(SIGHTS):
        sight.submit(prefill.core, index, COUNT, Handoff("context_only"))
    handed = 0
    for _ in range(2000):
        prefill.step()
        for index, answer in prefill.answers.items():
            if answer.handoff is not None:
                state = msgspec.structs.replace(answer.handoff, request_type="generation_only")
                SIGHTS[index].submit(decode.core, index, COUNT, state)
                answer.handoff, handed = None, handed + 1
        decode.step()
        if handed == len(SIGHTS) and decode.is_idle:
            break
    assert [decode.answers[index].tokens for index in range(len(SIGHTS))] == expected


def test_prompt_logprobs_are_of_the_placeholders_as_ids(runner: TorchRunner, oracle: Oracle) -> None:
    sight = SIGHTS[2]
    engine = engine_of(runner, oracle, tokens=7)
    plan = resolve_sampling(SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=1))
    engine.core.submit(Submit(1, sight.prompt, plan, media=sight.spans))
    engine.finish()
    entries = engine.answers[1].prompt_logprobs
    assert len(entries) == len(sight.prompt) - 1
    ids = torch.tensor([sight.prompt])
    with torch.no_grad():
        embeds = oracle.model.get_input_embeddings()(ids)
        embeds[0, [at for at, token in enumerate(sight.prompt) if token == IMAGE]] = torch.cat(
            [oracle.rows(name) for name in sight.pictures]
        )
        logits = oracle.model(inputs_embeds=embeds).logits[0]
    wanted = torch.log_softmax(logits.float(), dim=-1)
    for position, (entry, following) in enumerate(zip(entries, sight.prompt[1:], strict=True)):
        assert entry[following].logprob == pytest.approx(wanted[position, following].item(), abs=2e-4)


def test_an_embedding_is_copied_and_what_is_none_is_refused_in_a_sentence(runner: TorchRunner, tmp_path: Path) -> None:
    rows = torch.randn(ROWS, 64)
    shared = share(rows, tmp_path)
    loaded = runner.load_embedding(shared)
    assert loaded.rows == ROWS and torch.equal(loaded.tensor, rows)
    nan = rows.clone()
    nan[3, 5] = float("nan")
    for bad, says in (
        (share(rows.half(), tmp_path), r"float16 of shape \[9, 64\]; expected float32 of shape \[rows, 64\]"),
        (share(torch.randn(ROWS, 63), tmp_path), r"shape \[9, 63\]"),
        (share(torch.randn(64), tmp_path), r"shape \[64\]"),
        (share(nan, tmp_path), "NaN or infinite"),
        (SharedTensor(str(tmp_path / "gone"), "float32", (ROWS, 64)), "is gone"),
        (replace_shape(shared, (ROWS + 1, 64)), r"expected float32 of shape \[10, 64\]"),
    ):
        with pytest.raises(ValueError, match=says):
            runner.load_embedding(bad)


def replace_shape(shared: SharedTensor, shape: tuple[int, ...]) -> SharedTensor:
    return SharedTensor(shared.path, shared.dtype, shape)


def test_a_text_batch_is_what_it_was(runner: TorchRunner, oracle: Oracle) -> None:
    """No rows are put in, so a text model's pass is launched as before."""
    seen: list[Any] = []
    decoder = runner._decoder
    plain = decoder.hidden
    decoder.hidden = lambda inputs: (seen.append(inputs.media), plain(inputs))[1]  # type: ignore[method-assign]
    try:
        engine = engine_of(runner, oracle)
        Sight((17,)).submit(engine.core, 0, 3)
        engine.finish()
    finally:
        decoder.hidden = plain  # type: ignore[method-assign]
    assert seen and not any(seen)
