"""Three positions a token and deepstack, against transformers' Qwen2.5-VL and Qwen3-VL: positions, and logits.

Not tokens alone: random models answer the same with the positions of a transposed picture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_player import Answer, Engine
from runner_player import VOCAB, random_prompt
from torch import Tensor
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from trtx.torch_engine.batch import Embedding
from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.core.scheduler import SchedulerLimits
from trtx.torch_engine.handoff import KvTransport, create_transport
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.messages import Handoff, MediaSpan, Submit
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner
from trtx.torch_engine.runner.mrope import position_delta, positions_between

IMAGE, VIDEO, START, END = VOCAB - 1, VOCAB - 2, VOCAB - 3, VOCAB - 4
MERGE = 2
COUNT = 8
CLOSE = 2e-4
FAR = 20 * CLOSE  # what a wrong position moves at least, somewhere
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
}  # fmt: skip
_TOWER: dict[str, Any] = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
    "spatial_merge_size": MERGE, "temporal_patch_size": 2, "initializer_range": 0.3,
}  # fmt: skip
_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}


def build(family: str) -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    torch.manual_seed(5)
    if family == "qwen2.5-vl":
        text = _TEXT | {"rope_parameters": rope | {"mrope_section": [2, 2, 4]}}
        tower = _TOWER | {"window_size": 16, "fullatt_block_indexes": [1]}
        model: Any = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **_IDS)
        )
    else:
        text = _TEXT | {"head_dim": 24, "rope_parameters": rope | {"mrope_section": [5, 4, 3]}}
        tower = _TOWER | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        model = Qwen3VLForConditionalGeneration(
            Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **_IDS)
        )
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


Grid = tuple[int, int, int]
PROMPTS: dict[str, list[int | Grid]] = {
    "portrait": [4, (1, 3, 2), 5],
    "landscape": [4, (1, 2, 3), 5],
    "several": [2, (1, 4, 1), 1, (1, 2, 2), 7, (1, 1, 5), 3],
    "ends with it": [3, (1, 2, 4)],
    "text": [11],
}


class Seen:
    """One prompt, and what transformers makes of it."""

    def __init__(self, model: Any, parts: list[int | Grid], names: str = "") -> None:
        self.ids: list[int] = []
        self.spans: list[MediaSpan] = []
        pixels, self.grids = [], []
        for at, part in enumerate(parts):
            if isinstance(part, int):
                self.ids += [token % (VOCAB - 5) for token in random_prompt(part, at + part)]
                continue
            t, h, w = part
            rows = t * h * w
            self.spans.append(MediaSpan(len(self.ids), rows, bytes([at, t, h, w]) * 8, part))
            self.ids += [IMAGE] * rows
            self.grids.append((t, h * MERGE, w * MERGE))
            noise = torch.Generator().manual_seed(at * 100 + h * 10 + w)
            pixels.append(torch.randn(rows * MERGE**2, 3 * 2 * 4 * 4, generator=noise))
        self.grid = torch.tensor(self.grids) if self.grids else None
        self.pixels = torch.cat(pixels) if pixels else None
        self.model = model

    def features(self) -> list[Tensor]:
        """Rows of each picture, with those that deepstack adds behind them."""
        if self.pixels is None:
            return []
        with torch.no_grad():
            found = self.model.model.get_image_features(self.pixels, self.grid, return_dict=True)
        sizes = [span.length for span in self.spans]
        rows = torch.cat(list(found.pooler_output))
        stacked = getattr(found, "deepstack_features", None) or []
        levels = [torch.cat(list(level)) if isinstance(level, tuple) else level for level in stacked]
        return list(torch.cat([rows, *levels], dim=1).split(sizes))

    def kinds(self, ids: list[int]) -> Tensor:
        return torch.tensor([[int(token == IMAGE) for token in ids]])

    def positions(self, ids: list[int]) -> tuple[Tensor, int]:
        found, delta = self.model.model.get_rope_index(torch.tensor([ids]), self.kinds(ids), image_grid_thw=self.grid)
        return found[:, 0], int(delta)

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> Tensor:
        """``[len(ids), vocab]``"""
        more = {} if self.pixels is None else {"pixel_values": self.pixels, "image_grid_thw": self.grid}
        logits = self.model(
            input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            mm_token_type_ids=self.kinds(ids), **more,
        ).logits[0]  # fmt: skip
        return torch.log_softmax(logits.float(), dim=-1)


@pytest.fixture(scope="module", params=["qwen2.5-vl", "qwen3-vl"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    made, directory = build(request.param), tmp_path_factory.mktemp("checkpoint")
    made.save_pretrained(directory)
    return made, directory


def new_runner(model: tuple[Any, Path], num_blocks: int = 90) -> TorchRunner:
    return create_runner(
        RunnerArgs(model_dir=model[1], device="cpu", tokens_per_block=4, num_blocks=num_blocks, max_batch_size=6)
    )


@pytest.fixture(scope="module")
def runner(model: tuple[Any, Path]) -> TorchRunner:
    return new_runner(model)


@pytest.fixture(scope="module")
def prompts(model: tuple[Any, Path]) -> list[Seen]:
    return [Seen(model[0], parts) for parts in PROMPTS.values()]


def engine_of(runner: TorchRunner, tokens: int = 64, transport: KvTransport | None = None) -> Engine:
    engine = Engine(runner, overlap=True, transport=transport)
    engine.core = EngineCore(runner, SchedulerLimits(6, tokens), transport=transport)
    return engine


def put(engine: Engine, prompts: list[Seen]) -> None:
    for one in prompts:
        for span, rows in zip(one.spans, one.features(), strict=True):
            engine.core.scheduler.media.put(span.key, Embedding(rows.shape[0], rows))


def submit(
    engine: Engine, at: int, one: Seen, handoff: Handoff | None = None, *, count: int = COUNT, prompt: int | None = 0
) -> None:
    plan = resolve_sampling(
        SamplingParams(max_tokens=count, ignore_eos=True, logprobs=3, prompt_logprobs=prompt, temperature=0.0)
    )
    engine.core.submit(Submit(at, one.ids, plan, handoff=handoff, media=one.spans))


def assert_logits(one: Seen, answer: Answer) -> None:
    """Of the prompt's tokens, where they were asked for, and of all that was generated."""
    # transformers takes a placeholder that was generated for one of a picture.
    count = next((at for at, token in enumerate(answer.tokens) if token in (IMAGE, VIDEO)), len(answer.tokens))
    ids = one.ids + answer.tokens[:count]
    expected = one.logprobs(ids)
    entries = answer.prompt_logprobs + answer.logprobs[:count]
    start = len(ids) - len(entries)
    for position, entry in enumerate(entries, start=start):
        for token, value in entry.items():
            assert value.logprob == pytest.approx(expected[position - 1, token].item(), abs=CLOSE), (position, token)


@pytest.mark.parametrize("tokens", [6, 7, 11, 64])
def test_logits_are_transformers_wherever_a_prompt_is_cut(
    runner: TorchRunner, prompts: list[Seen], tokens: int
) -> None:
    engine = engine_of(runner, tokens)
    put(engine, prompts)
    for at, one in enumerate(prompts):
        submit(engine, at, one)
    engine.finish()
    for at, one in enumerate(prompts):
        answer = engine.answers[at]
        assert len(answer.tokens) == COUNT and len(answer.prompt_logprobs) == len(one.ids) - 1
        assert_logits(one, answer)


def test_logits_are_transformers_from_the_prefix_cache_and_after_preemption(
    model: tuple[Any, Path], prompts: list[Seen]
) -> None:
    engine = engine_of(new_runner(model, num_blocks=14))
    put(engine, prompts)
    for first in (0, 10):
        for at, one in enumerate(prompts):
            submit(engine, first + at, one, count=20, prompt=None)
        engine.finish()
    assert engine.paused and engine.core.scheduler.pool.counters.reused
    for at, one in enumerate(prompts):
        assert_logits(one, engine.answers[at])
        assert_logits(one, engine.answers[10 + at])


def test_a_decode_side_knows_the_positions_and_needs_no_picture(
    runner: TorchRunner, model: tuple[Any, Path], prompts: list[Seen]
) -> None:
    there = new_runner(model)
    ends = [create_transport(one.pool, one.geometry, routes=["direct"]) for one in (runner, there)]
    try:
        prefill, decode = engine_of(runner, transport=ends[0]), engine_of(there, transport=ends[1])
        put(prefill, prompts)
        for at, one in enumerate(prompts):
            submit(prefill, at, one, Handoff("context_only"), prompt=None)
        handed = 0
        for _ in range(2000):
            prefill.step()
            for at, answer in prefill.answers.items():
                if answer.handoff is not None:
                    state = msgspec.structs.replace(answer.handoff, request_type="generation_only")
                    submit(decode, at, prompts[at], state, prompt=None)
                    answer.handoff, handed = None, handed + 1
            decode.step()
            if handed == len(prompts) and decode.is_idle:
                break
        for at, one in enumerate(prompts):
            assert len(decode.answers[at].tokens) == COUNT
            assert_logits(one, decode.answers[at])
    finally:
        for end in ends:
            end.close()


@pytest.mark.parametrize("name", ["portrait", "several"])
def test_a_transposed_grid_is_seen_in_the_logits(runner: TorchRunner, prompts: list[Seen], name: str) -> None:
    """What the tests above rest on: a wrong position is further off than they allow."""
    one = prompts[list(PROMPTS).index(name)]
    engine = engine_of(runner)
    put(engine, [one])
    spans = [
        msgspec.structs.replace(span, grid=(span.grid[0], span.grid[2], span.grid[1]))
        for span in one.spans
        if span.grid
    ]
    plan = resolve_sampling(SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0))
    engine.core.submit(Submit(0, one.ids, plan, media=spans))
    engine.finish()
    expected = one.logprobs(one.ids)
    off = [
        abs(entry[token].logprob - expected[position, token].item())
        for position, (entry, token) in enumerate(zip(engine.answers[0].prompt_logprobs, one.ids[1:], strict=True))
    ]
    assert max(off) > FAR


def test_media_without_a_grid_are_refused(runner: TorchRunner, prompts: list[Seen]) -> None:
    engine = engine_of(runner)
    put(engine, prompts)
    one = prompts[0]
    spans = [msgspec.structs.replace(span, grid=None) for span in one.spans]
    engine.core.submit(Submit(0, one.ids, resolve_sampling(SamplingParams(max_tokens=1)), media=spans))
    with pytest.raises(AssertionError, match="media 0 has no grid"):
        engine.finish()


@pytest.mark.parametrize(
    "parts",
    [
        *PROMPTS.values(),
        [(1, 5, 1), 1, (1, 1, 5)],
        [1, (4, 2, 2), 1, (1, 2, 2), 2],
        [1, (6, 1, 2)],
        [(5, 1, 1), 2, (1, 3, 3)],
    ],
)
def test_positions_are_those_of_get_rope_index_in_every_cut(model: tuple[Any, Path], parts: list[int | Grid]) -> None:
    """Media that lasts too: positions of what follows it go by its sides alone, those of an answer by its time too."""
    one = Seen(model[0], parts)
    expected, delta = one.positions(one.ids)
    length = len(one.ids)
    assert position_delta(one.spans, length) == delta
    after = torch.arange(length, length + 5) + delta
    whole = torch.cat([expected, after.expand(3, 5)], dim=1)
    for cut in range(length + 5):
        left = positions_between(one.spans, length, 0, cut)
        right = positions_between(one.spans, length, cut, length + 5)
        assert torch.tensor(left).tolist() == whole[:, :cut].tolist()
        assert torch.tensor(right).tolist() == whole[:, cut:].tolist()
