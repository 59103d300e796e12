"""Trains draft models for ``synthetic:tiny-trained``: ``python tools/training/train_drafts.py``, minutes of one core.

Two models, for the two kinds of speculation that need weights. ``tiny-draft`` (Draft_Target) is the first two layers of
the target model, trained on. ``tiny-eagle3`` (Eagle3) is an EAGLE-3 head: one layer that reads three hidden states of
the target model, with a vocabulary of the tokens that answers have. Both learn the tokens that the target model would
choose next. The head is unrolled for as many tokens as the recipe drafts, each from its own hidden state of the token
before, as in EAGLE-3's training-time test. The same seed gives the same bytes on the same machine.

The first of the three hidden states is the embedding. Without it the head can't copy: to continue a word that occurred
before, its one layer must find the positions of that word, and the layers of this target model add to an embedding
hidden states that are 70 times as large, from which no linear layer recovers the token.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from muon import Float32Muon
from safetensors.torch import save_file
from torch import Tensor
from training_run import encoder
from transformers import AutoModelForCausalLM, AutoTokenizer

from trtx.checkpoint.synthetic import TRAINED_DIRECTORY
from trtx.checkpoint.tasks import TASKS, samples
from trtx.checkpoint.text import sentences

log = logging.getLogger("train_drafts")

DRAFT_DIRECTORY = TRAINED_DIRECTORY.with_name("tiny_draft")
EAGLE_DIRECTORY = TRAINED_DIRECTORY.with_name("tiny_eagle3")
DRAFT_LAYERS, DRAFT_STEPS, EAGLE_STEPS = 2, 100, 120
ROWS, MUON_RATE, ADAM_RATE = 16, 0.015, 2e-3
UNROLLED, DRAFT_VOCABULARY = 4, 640
CAPTURED = (-1, 1, 2)  # -1: the embeddings
TEXT_PROMPT, TEXT_ANSWER, TEXTS = 32, 64, 192
_IGNORED = -100


class Answers:
    """Token ids of training prompts with answers; each with the length of its prompt."""

    def __init__(self, model: Any, encode: Callable[[str], list[int]], seed: int, texts: int = TEXTS) -> None:
        """``texts``: texts that the target model continues."""
        self._encode = encode
        self._dice = random.Random(seed)
        self._tasks = {task: samples(task, "train", seed + 1) for task in TASKS}
        self._texts = list(self._continued(model, seed, texts))

    def _continued(self, model: Any, seed: int, texts: int) -> Iterator[tuple[list[int], int]]:
        """Continues training text greedily, as the target model would answer it."""
        ids = self._encode("".join(sentences(seed + 2, 40 * texts)))
        begins = [self._dice.randrange(len(ids) - TEXT_PROMPT) for _ in range(texts)]
        lengths = [self._dice.choice((TEXT_PROMPT // 2, TEXT_PROMPT)) for _ in begins]
        for length in (TEXT_PROMPT // 2, TEXT_PROMPT):
            prompts = [ids[begin : begin + length] for begin, own in zip(begins, lengths, strict=True) if own == length]
            if not prompts:
                continue
            whole = model.generate(
                torch.tensor(prompts), attention_mask=torch.ones(len(prompts), length, dtype=torch.long),
                max_new_tokens=TEXT_ANSWER, do_sample=False, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            yield from ((row, length) for row in whole.tolist())

    def batch(self, rows: int = ROWS) -> tuple[Tensor, Tensor]:
        """Returns (ids, mask of the answers), both ``[rows, longest]``."""
        drawn = []
        for _ in range(rows):
            if self._dice.random() < 0.25:
                drawn.append(self._dice.choice(self._texts))
                continue
            # Longer answers have more tokens to guess.
            task = self._dice.choices(list(TASKS), weights=[1, 2, 1, 4, 1, 4])[0]
            sample = next(self._tasks[task])
            prompt, answer = sample.chat() if self._dice.random() < 0.7 else sample.plain()
            before = self._encode(prompt)
            drawn.append((before + self._encode(answer), len(before)))
        longest = max(len(ids) for ids, _ in drawn)
        ids = torch.zeros(rows, longest, dtype=torch.long)
        answers = torch.zeros(rows, longest, dtype=torch.bool)
        for row, (tokens, begin) in enumerate(drawn):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            answers[row, begin : len(tokens)] = True
        return ids, answers


def optimizers(parameters: dict[str, Tensor]) -> list[tuple[Any, float]]:
    """Muon for the matrices of layers, AdamW for all else, each with its peak learning rate."""
    vocabulary = ("embed", "lm_head")
    matrices = [
        value for name, value in parameters.items() if value.ndim == 2 and not any(one in name for one in vocabulary)
    ]
    known = {id(value) for value in matrices}
    others = [value for value in parameters.values() if id(value) not in known]
    return [
        (Float32Muon(matrices, lr=MUON_RATE), MUON_RATE),
        (torch.optim.AdamW(others, lr=ADAM_RATE, weight_decay=0.0), ADAM_RATE),
    ]


def descend(steps: list[tuple[Any, float]], loss: Tensor, share: float) -> None:
    for optimizer, peak in steps:
        optimizer.zero_grad(set_to_none=True)
        for group in optimizer.param_groups:
            group["lr"] = peak * share
    loss.backward()  # type: ignore[no-untyped-call]
    for optimizer, _ in steps:
        optimizer.step()


def rate(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / 20) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train_draft(target: Any, answers: Answers, steps: int, out: Path) -> None:
    """Trains the first layers of the target model to say what the whole of it says."""
    config = type(target.config)(**target.config.to_dict() | {"num_hidden_layers": DRAFT_LAYERS, "layer_types": None})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(target.state_dict(), strict=False)
    descents = optimizers(dict(model.named_parameters()))
    for step in range(steps):
        ids, mask = answers.batch()
        with torch.no_grad():
            wanted = target(input_ids=ids, use_cache=False).logits.argmax(-1)
        logits = model(input_ids=ids, use_cache=False).logits
        labels = wanted[:, :-1].masked_fill(~mask[:, 1:], _IGNORED)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=_IGNORED)
        descend(descents, loss, rate(step, steps))
        if step % 10 == 0 or step == steps - 1:
            right = (logits[:, :-1].argmax(-1) == labels)[labels != _IGNORED].float().mean()
            log.info("tiny-draft: step %d of %d, loss %.3f, right %.3f", step, steps, loss.item(), right)
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copyfile(TRAINED_DIRECTORY / name, out / name)
    stated = json.loads((TRAINED_DIRECTORY / "config.json").read_text())
    write_config(out, stated | {"num_hidden_layers": DRAFT_LAYERS, "max_window_layers": DRAFT_LAYERS})
    write_weights(out, {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"})


class Head(torch.nn.Module):
    """An EAGLE-3 head, with the names of the public checkpoints."""

    def __init__(self, target: Any, vocabulary: Tensor, sizes: list[float]) -> None:
        """``sizes``: root mean squares of the three hidden states. Undivided, they leave the layer's own output no say:
        it is added to them before the last norm."""
        super().__init__()
        config = target.config
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.theta, self.epsilon = config.rope_parameters["rope_theta"], config.rms_norm_eps
        hidden, inner = config.hidden_size, config.intermediate_size
        last = target.model.layers[-1]
        generator = torch.Generator().manual_seed(0)

        def drawn(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator) * 0.5 / math.sqrt(columns)

        def own(value: Tensor) -> Tensor:
            return value.detach().clone()

        attention, mlp = "midlayer.self_attn", "midlayer.mlp"
        start = {
            "fc.weight": torch.cat(
                (
                    torch.eye(hidden) * 2.0 / sizes[0],
                    drawn(hidden, hidden) / sizes[1],
                    torch.eye(hidden) / sizes[2],
                ),
                dim=1,
            ),
            f"{attention}.q_proj.weight": drawn(self.heads * self.dim, 2 * hidden),
            f"{attention}.k_proj.weight": drawn(self.kv_heads * self.dim, 2 * hidden),
            f"{attention}.v_proj.weight": drawn(self.kv_heads * self.dim, 2 * hidden),
            f"{attention}.o_proj.weight": drawn(hidden, self.heads * self.dim) * 0.2,
            f"{mlp}.gate_proj.weight": drawn(inner, hidden),
            f"{mlp}.up_proj.weight": drawn(inner, hidden),
            f"{mlp}.down_proj.weight": drawn(hidden, inner) * 0.2,
            "midlayer.hidden_norm.weight": torch.ones(hidden),
            "midlayer.input_layernorm.weight": torch.ones(hidden),
            "midlayer.post_attention_layernorm.weight": own(last.post_attention_layernorm.weight),
            "norm.weight": own(target.model.norm.weight),
            "lm_head.weight": own(target.model.embed_tokens.weight)[vocabulary],
        }
        self._begin_with_copying(start, hidden, generator)
        self.values = torch.nn.ParameterDict({name.replace(".", "/"): value for name, value in start.items()})
        self.embedding = own(target.model.embed_tokens.weight)

    def _begin_with_copying(self, start: dict[str, Tensor], hidden: int, generator: torch.Generator) -> None:
        """Makes the first query head of each KV head an induction head, which training alone finds only after long.

        It looks for earlier positions of the next token, by dimensions that RoPE hardly turns, and adds the embedding
        of the token that followed there.
        """
        q, k, v, o = (start[f"midlayer.self_attn.{name}_proj.weight"] for name in "qkvo")
        quarter, half = self.dim // 4, self.dim // 2
        slow = torch.cat((torch.arange(quarter, half), torch.arange(half + quarter, self.dim)))
        matched, copied = (
            torch.linalg.qr(torch.randn(hidden, hidden, generator=generator))[0] for _ in range(2)
        )  # orthogonal rows
        for head in range(self.kv_heads):
            query = head * (self.heads // self.kv_heads) * self.dim
            key = head * self.dim
            rows = matched[head * half : (head + 1) * half] * 2.5
            values = copied[key : key + self.dim]
            nothing = torch.zeros_like(rows)
            q[query : query + self.dim] *= 0.3
            q[query + slow] = torch.cat((rows, nothing), dim=1)
            k[key + slow] = torch.cat((nothing, rows), dim=1)
            v[key : key + self.dim] = torch.cat((values, torch.zeros_like(values)), dim=1)
            o[:, query : query + self.dim] = values.T * 6.0

    def __getitem__(self, name: str) -> Tensor:
        value: Tensor = self.values[f"{name}.weight".replace(".", "/")]
        return value

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self[name] * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)

    def rotate(self, x: Tensor) -> Tensor:
        """RoPE of ``[rows, heads, tokens, dim]``."""
        half = torch.arange(0, self.dim, 2) / self.dim
        angles = torch.arange(x.shape[2])[:, None] / self.theta**half
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def projected(self, x: Tensor, kind: str, heads: int) -> Tensor:
        found = F.linear(x, self[f"midlayer.self_attn.{kind}_proj"])
        found = found.view(*x.shape[:2], heads, self.dim).transpose(1, 2)
        return found if kind == "v" else self.rotate(found)

    def forward(self, following: Tensor, features: Tensor, unrolled: int) -> list[Tensor]:
        """Returns logits over the draft vocabulary for each of ``unrolled`` passes, all ``[rows, tokens, vocabulary]``.

        ``following`` [rows, tokens]: the token after each position. A pass reads in place of the features the hidden
        state of the pass before, one position back. It attends to the keys of the first pass up to where the features
        are the target model's, and to one key of each later pass.
        """
        hidden = F.linear(features, self["fc"])
        embedded = self.norm(F.embedding(following, self.embedding), "midlayer.input_layernorm")
        count, tokens = self.heads // self.kv_heads, following.shape[1]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        for depth in range(unrolled):
            joined = torch.cat((embedded, self.norm(hidden, "midlayer.hidden_norm")), dim=-1)
            q = self.projected(joined, "q", self.heads)
            keys.append(self.projected(joined, "k", self.kv_heads).repeat_interleave(count, dim=1))
            values.append(self.projected(joined, "v", self.kv_heads).repeat_interleave(count, dim=1))
            seen = torch.ones(tokens, tokens, dtype=torch.bool).tril(-depth)
            scores = [(q @ keys[0].mT).masked_fill(~seen, -1e9)]
            later = range(1, depth + 1)
            scores += [(q * shifted(keys[at], depth - at)).sum(-1, keepdim=True) for at in later]
            shares = (torch.cat(scores, dim=-1) / math.sqrt(self.dim)).softmax(-1)
            attended = shares[..., :tokens] @ values[0]
            for at in later:
                attended = attended + shares[..., tokens + at - 1, None] * shifted(values[at], depth - at)
            hidden = hidden + F.linear(attended.transpose(1, 2).flatten(2), self["midlayer.self_attn.o_proj"])
            normed = self.norm(hidden, "midlayer.post_attention_layernorm")
            gated = F.silu(F.linear(normed, self["midlayer.mlp.gate_proj"]))
            gated = gated * F.linear(normed, self["midlayer.mlp.up_proj"])
            hidden = hidden + F.linear(gated, self["midlayer.mlp.down_proj"])
            logits.append(F.linear(self.norm(hidden, "norm"), self["lm_head"]))
            hidden = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
        return logits


def shifted(x: Tensor, places: int) -> Tensor:
    """Moves ``[rows, heads, tokens, dim]`` towards later tokens."""
    return F.pad(x, (0, 0, places, 0))[:, :, : x.shape[2]] if places else x


def captured(target: Any, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """Returns the hidden states that a head reads, and the tokens that the target model chooses."""
    with torch.no_grad():
        found = target(input_ids=ids, use_cache=False, output_hidden_states=True)
    return [found.hidden_states[layer + 1] for layer in CAPTURED], found.logits.argmax(-1)


def train_head(target: Any, answers: Answers, steps: int, out: Path) -> None:
    counts: Counter[int] = Counter()
    for _ in range(40):
        ids, mask = answers.batch()
        counts.update(ids[mask].tolist())
    vocabulary = torch.tensor(sorted(token for token, _ in counts.most_common(DRAFT_VOCABULARY)))
    rank = torch.full((target.config.vocab_size,), _IGNORED)
    rank[vocabulary] = torch.arange(len(vocabulary))
    head = Head(
        target, vocabulary, [one.pow(2).mean().sqrt().item() for one in captured(target, answers.batch()[0])[0]]
    )
    descents = optimizers(dict(head.named_parameters()))
    for step in range(steps):
        ids, mask = answers.batch()
        loss, known = torch.zeros(()), 0
        right = torch.zeros(UNROLLED)
        ends = mask.shape[1] - mask.int().flip(1).argmax(1)
        for rows in ends.argsort().chunk(4):  # rows of about the same length, so that little is padding
            own, answered = (one[rows, : int(ends[rows].max())] for one in (ids, mask))
            states, chosen = captured(target, own)
            passes = head(own[:, 1:], torch.cat(states, dim=-1)[:, :-1], UNROLLED)
            # Position p with the token after it predicts the token that the target model chooses at p + 1.
            labels = rank[chosen][:, 1:].masked_fill(~F.pad(answered, (0, 1))[:, 2:], _IGNORED)
            is_known = labels != _IGNORED
            known += int(is_known.sum())
            for depth, logits in enumerate(passes):
                loss = loss + 0.8**depth * F.cross_entropy(logits[is_known], labels[is_known], reduction="sum")
                right[depth] += (logits.argmax(-1) == labels)[is_known].sum()
        descend(descents, loss / known, rate(step, steps))
        if step % 10 == 0 or step == steps - 1:
            shown = " ".join(f"{one:.3f}" for one in (right / known).tolist())
            log.info("tiny-eagle3: step %d of %d, right %s", step, steps, shown)
    out.mkdir(parents=True, exist_ok=True)
    stated = json.loads((TRAINED_DIRECTORY / "config.json").read_text())
    kept = (
        "hidden_act", "hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads",
        "rms_norm_eps", "rope_theta", "max_position_embeddings", "vocab_size",
    )  # fmt: skip
    config = {name: stated[name] for name in kept} | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "draft_vocab_size": len(vocabulary), "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in CAPTURED]},
    }  # fmt: skip
    write_config(out, config)
    tensors = {name.removeprefix("values.").replace("/", "."): value for name, value in head.named_parameters()}
    covered = torch.zeros(target.config.vocab_size, dtype=torch.bool)
    covered[vocabulary] = True
    write_weights(out, tensors, {"d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": covered})


def write_config(out: Path, config: dict[str, Any]) -> None:
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_weights(out: Path, tensors: Mapping[str, Tensor], others: dict[str, Tensor] | None = None) -> None:
    """Writes ``tensors`` in bfloat16 and ``others`` as they are."""
    state = {name: value.detach().bfloat16().contiguous() for name, value in tensors.items()}
    path = out / "model.safetensors"
    save_file({**state, **(others or {})}, path, metadata={"format": "pt"})
    path.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/training/train_drafts.py", description=__doc__)
    parser.add_argument("--only", choices=("draft", "eagle3"), help="train one of the two")
    parser.add_argument("--draft-out", type=Path, default=DRAFT_DIRECTORY)
    parser.add_argument("--eagle3-out", type=Path, default=EAGLE_DIRECTORY)
    parser.add_argument("--draft-steps", type=int, default=DRAFT_STEPS)
    parser.add_argument("--eagle3-steps", type=int, default=EAGLE_STEPS)
    parser.add_argument("--texts", type=int, default=TEXTS, help="training texts that the target model continues")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)  # more make no step faster at this size
    torch.manual_seed(arguments.seed)
    began = time.process_time()
    target = AutoModelForCausalLM.from_pretrained(
        TRAINED_DIRECTORY, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    encode = encoder(AutoTokenizer.from_pretrained(TRAINED_DIRECTORY))

    if arguments.only != "eagle3":
        train_draft(
            target, Answers(target, encode, arguments.seed, arguments.texts), arguments.draft_steps, arguments.draft_out
        )
    if arguments.only != "draft":
        train_head(
            target,
            Answers(target, encode, arguments.seed, arguments.texts),
            arguments.eagle3_steps,
            arguments.eagle3_out,
        )
    log.info("%.0f s of CPU", time.process_time() - began)


if __name__ == "__main__":
    main()
