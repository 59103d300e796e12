"""An EAGLE-3 head in the layout of the public checkpoints: what it drafts, and the very tokens that come of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_player import Wish, assert_equal, served, workload
from guided_player import guided_workload, served_guided
from runner_player import VOCAB, build, random_prompt, save
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from trtx.errors import UsageError
from trtx.torch_engine.core.speculation.create import create_speculation
from trtx.torch_engine.core.speculation.speculation import Speculation
from trtx.torch_engine.drafting import DraftShare
from trtx.torch_engine.llm_args import SpeculativeConfig
from trtx.torch_engine.runner import DraftArgs, RunnerArgs, TorchRunner, create_runner

MOST = 3
HIDDEN, INNER, HEADS, KV_HEADS, DIM, DRAFT_VOCAB = 64, 80, 4, 2, 16, 100
CAPTURED = [0, 1, 2]
EPSILON, THETA = 1e-5, 5000.0


def build_target() -> PreTrainedModel:
    return build("qwen3", num_hidden_layers=4)


def head_tensors() -> dict[str, Tensor]:
    torch.manual_seed(5)
    attention, mlp, kv = "midlayer.self_attn", "midlayer.mlp", (KV_HEADS * DIM, 2 * HIDDEN)
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN), "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
        f"{attention}.q_proj.weight": (HEADS * DIM, 2 * HIDDEN), f"{attention}.k_proj.weight": kv,
        f"{attention}.v_proj.weight": kv, f"{attention}.o_proj.weight": (HIDDEN, HEADS * DIM),
        f"{mlp}.gate_proj.weight": (INNER, HIDDEN), f"{mlp}.up_proj.weight": (INNER, HIDDEN),
        f"{mlp}.down_proj.weight": (HIDDEN, INNER),
    }  # fmt: skip
    tensors = {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    for norm in ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm"):
        tensors[f"{norm}.weight"] = 1 + 0.2 * torch.randn(HIDDEN)
    chosen = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    tensors["d2t"] = chosen - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True)
    return tensors


def save_head(directory: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1, "rms_norm_eps": EPSILON, "rope_theta": THETA, "max_position_embeddings": 512,
        "vocab_size": VOCAB, "draft_vocab_size": DRAFT_VOCAB, "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config | changes))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build_target(), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_head(tmp_path_factory.mktemp("head"), head_tensors())


def new_runner(target: Path, head: Path, *, layers: list[int] | None = None) -> TorchRunner:
    return create_runner(
        RunnerArgs(
            model_dir=target, device="cpu", tokens_per_block=8, num_blocks=11, max_batch_size=5, guided=True,
            max_draft_len=MOST, draft=DraftArgs("Eagle3", str(head), CAPTURED if layers is None else layers),
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def runner(target: Path, head: Path) -> TorchRunner:
    return new_runner(target, head)


def always(runner: TorchRunner) -> Speculation:
    config = SpeculativeConfig(decoding_type="Eagle3", max_draft_len=MOST, draft_len_schedule={5: MOST})
    return create_speculation(config, runner, max_num_tokens=24)


class Reference:
    """EAGLE-3 in plain torch, one position after the other."""

    def __init__(self, model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
        self._model, self._tensors = model, tensors

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * self._tensors[f"{name}.weight"]

    def _rotated(self, x: Tensor, position: int) -> Tensor:
        angles = position / THETA ** (torch.arange(0, DIM, 2) / DIM)
        first, second = x.chunk(2, dim=-1)
        return torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1
        )

    @torch.inference_mode()
    def draft(self, known: list[int], count: int) -> list[int]:
        weights = self._tensors
        states = self._model(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([states[layer + 1][0] for layer in CAPTURED], dim=-1) @ weights["fc.weight"].T
        embedding = self._model.get_input_embeddings().weight
        keys: list[Tensor] = []
        values: list[Tensor] = []
        following, drafted, hidden = known[1:], [], features[0]
        for position in range(len(known) - 2 + count):
            if position < len(features):
                hidden = features[position]
            joined = torch.cat((
                self._norm(embedding[following[position]], "midlayer.input_layernorm"),
                self._norm(hidden, "midlayer.hidden_norm"),
            ))  # fmt: skip
            q, k, v = (
                (weights[f"midlayer.self_attn.{kind}_proj.weight"] @ joined).view(-1, DIM) for kind in ("q", "k", "v")
            )
            keys.append(self._rotated(k, position))
            values.append(v)
            share = HEADS // KV_HEADS
            every_key, every_value = (
                torch.stack(kept).repeat_interleave(share, dim=1) for kept in (keys, values)
            )  # [positions, heads, dim]
            scores = torch.einsum("hd,phd->hp", self._rotated(q, position), every_key) / DIM**0.5
            attended = torch.einsum("hp,phd->hd", scores.softmax(-1), every_value).flatten()
            hidden = hidden + weights["midlayer.self_attn.o_proj.weight"] @ attended
            normed = self._norm(hidden, "midlayer.post_attention_layernorm")
            gated = F.silu(weights["midlayer.mlp.gate_proj.weight"] @ normed)
            gated = gated * (weights["midlayer.mlp.up_proj.weight"] @ normed)
            hidden = hidden + weights["midlayer.mlp.down_proj.weight"] @ gated
            if position >= len(known) - 2:
                best = int((weights["lm_head.weight"] @ self._norm(hidden, "norm")).argmax())
                drafted.append(best + int(weights["d2t"][best]))
                following.append(drafted[-1])
        return drafted


def test_the_engine_drafts_what_the_public_method_drafts(target: Path, head: Path) -> None:
    """In every step of a request with a prefix hit, also of one that was computed in chunks."""
    runner = new_runner(target, head)
    model = runner.draft_model
    assert model is not None
    drafts: list[tuple[int, list[int]]] = []

    class Recording:
        token_shift, room = model.token_shift, model.room

        def draft(self, shares: Sequence[DraftShare]) -> list[list[int]]:
            found = model.draft(shares)
            drafts.extend(
                (share.start + len(share.tokens) + 1, tokens) for share, tokens in zip(shares, found, strict=True)
            )
            return found

    runner.draft_model = Recording()
    speculation = always(runner)
    reference = Reference(build_target(), head_tensors())
    for wish in [Wish(0, random_prompt(37, 0)[:length], {"max_tokens": 10}, None) for length in (20, 37)]:
        found, _ = served(runner, [wish], overlap=True, step_tokens=16, speculation=speculation)
        whole = wish.prompt + found[0].tokens
        made = [(length, tokens) for length, tokens in drafts if tokens]
        assert len(made) > 3
        for length, tokens in made:
            assert tokens == reference.draft(whole[:length], len(tokens))
        drafts.clear()


def play(runner: TorchRunner, seed: int) -> None:
    wishes = workload(seed)
    expected, _ = served(runner, wishes, overlap=False)
    speculation = always(runner)
    found, _ = served(runner, wishes, overlap=True, speculation=speculation)
    assert_equal(found, expected, wishes)
    assert sum(speculation.counts.drafted)


def test_tokens_are_the_same_with_an_eagle_head_and_without(runner: TorchRunner) -> None:
    play(runner, 3)


@pytest.mark.proof
def test_tokens_are_the_same_with_an_eagle_head_and_without_in_many_workloads(runner: TorchRunner) -> None:
    """2,100 requests."""
    for seed in range(200, 350):
        play(runner, seed)


@pytest.mark.proof
def test_guided_tokens_are_the_same_with_an_eagle_head_and_without_in_many_workloads(runner: TorchRunner) -> None:
    """2,070 requests."""
    for seed in range(400, 630):
        wishes = guided_workload(seed)
        expected = served_guided(runner, wishes, overlap=False)
        assert_equal(served_guided(runner, wishes, overlap=True, speculation=always(runner)), expected, wishes)


def test_a_head_with_its_own_embedding_loads(target: Path, tmp_path: Path) -> None:
    save_head(tmp_path / "own", head_tensors() | {"embed_tokens.weight": torch.randn(VOCAB, HIDDEN)})
    play(new_runner(target, tmp_path / "own"), 0)


@pytest.mark.parametrize(
    ("tensors", "config", "layers", "message"),
    [
        ({}, {"hidden_size": 128}, None, "hidden_size is 128, and the target model has 64"),
        ({}, {"vocab_size": VOCAB - 1}, None, "vocab_size is 210, and the target model has 211"),
        ({}, {}, [0, 1, 3], r"eagle3_layers_to_capture is \[0, 1, 3\]; expected three different layers from 0 to 2"),
        ({"fc.weight": torch.zeros(HIDDEN, HIDDEN)}, {}, None, r"fc.weight has shape \[64, 64\], .* say \[64, 192\]"),
        ({"midlayer.extra": torch.zeros(2)}, {}, None, "holds the tensor midlayer.extra"),
        ({"d2t": torch.full((DRAFT_VOCAB,), VOCAB)}, {}, None, "d2t leads to token 310"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_in_a_sentence(
    target: Path, tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any], layers: Any, message: str
) -> None:
    save_head(tmp_path / "head", head_tensors() | tensors, **config)
    with pytest.raises(UsageError, match=message):
        new_runner(target, tmp_path / "head", layers=layers)
