"""EAGLE-3 heads in the layout of the public checkpoints, and what they draft by plain torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from runner_player import VOCAB, build
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from trtx.torch_engine.drafting import DraftModel, DraftShare

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


class Reference:
    """EAGLE-3 in plain torch, one position after the other. ``captured``: layers, -1 for the embeddings."""

    def __init__(self, model: PreTrainedModel, tensors: dict[str, Tensor], captured: Sequence[int] = CAPTURED) -> None:
        self._model, self._tensors, self._captured = model, tensors, captured

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
        features = torch.cat([states[layer + 1][0] for layer in self._captured], dim=-1) @ weights["fc.weight"].T
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


class RecordingModel:
    """A draft model that records (number of known tokens, drafted tokens) of each draft of another one."""

    def __init__(self, model: DraftModel) -> None:
        self.token_shift, self.room, self.pools = model.token_shift, model.room, model.pools
        self.drafts: list[tuple[int, list[int]]] = []
        self._model = model

    def draft(self, shares: Sequence[DraftShare]) -> list[list[int]]:
        found = self._model.draft(shares)
        for share, tokens in zip(shares, found, strict=True):
            self.drafts.append((share.start + len(share.tokens) + 1, tokens))
        return found
