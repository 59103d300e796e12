"""A checkpoint whose greedy answers are written down: the last token of a prompt chooses one of several texts.

Attention and MLP add nothing to the hidden state, so the next token depends on the last one alone. Each piece of a text
is a token of its own that occurs once in all texts, and its logits are highest at the next piece.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END, TAGS = "<|im_end|>", ("<think>", "</think>")
_SPECIAL = ("<|pad|>", "<|im_start|>", END)
_HEADS, _HEAD_DIM = 2, 8


def choice(name: str) -> str:
    """The special token that chooses a text."""
    return f"<|say-{name}|>"


def write_scripted(directory: Path, texts: Mapping[str, str], template: str) -> Path:
    """A model that says ``texts[name]`` after a prompt that ends with ``choice(name)``.

    Each tag of :data:`TAGS` is one token, as in models that think, and may occur once in all texts.
    """
    used: set[str] = set()
    chains = {name: list(_pieces(text, used)) for name, text in texts.items()}
    tokenizer = _tokenizer([piece for chain in chains.values() for piece in chain], [choice(name) for name in texts])
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    size = -(-tokenizer.get_vocab_size() // 16) * 16
    after = {}
    for name, chain in chains.items():
        ids = [tokenizer.token_to_id(one) for one in (choice(name), *map(_symbols, chain), END)]
        assert None not in ids, name
        after.update(pairwise(ids))
    _write_weights(directory, size, after)
    _write_configs(directory, size, template, tokenizer)
    return directory


def _pieces(text: str, used: set[str]) -> Iterator[str]:
    for part in re.split("|".join(f"({tag})" for tag in TAGS), text):
        if part in TAGS:
            assert part not in used, f"{part} occurs twice, and what follows it depends on it alone"
            used.add(part)
            yield part
        elif part:
            yield from _cut(part, used)


def _cut(text: str, used: set[str]) -> list[str]:
    """``text`` in new pieces of at least two characters, each as short as the rest allows."""
    found = _first_cut(text, frozenset(used))
    assert found is not None, f"{text!r} is too short to differ from the other texts"
    used.update(found)
    return found


def _first_cut(text: str, used: frozenset[str]) -> list[str] | None:
    if not text:
        return []
    for length in range(2, len(text) + 1):
        piece = text[:length]
        if piece not in used and (rest := _first_cut(text[length:], used | {piece})) is not None:
            return [piece, *rest]
    return None


def _symbols(piece: str) -> str:
    """``piece`` in the alphabet of a byte-level BPE."""
    if piece in TAGS or piece in _SPECIAL:
        return piece
    return "".join(part for part, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(piece))


def _tokenizer(pieces: list[str], choices: list[str]) -> Tokenizer:
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(_symbols(one) for one in pieces if one not in TAGS)]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(one, normalized=False) for one in (*_SPECIAL, *choices)])
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in TAGS])
    return tokenizer


def _write_weights(directory: Path, size: int, after: Mapping[int, int]) -> None:
    width, inner = _HEADS * _HEAD_DIM, 16
    embedding, head = np.eye(size, dtype=np.float32), np.zeros((size, size), np.float32)
    for before, following in after.items():
        head[following, before] = 1.0
    layer = {
        "input_layernorm": np.ones(size), "post_attention_layernorm": np.ones(size),
        "self_attn.q_norm": np.ones(_HEAD_DIM), "self_attn.k_norm": np.ones(_HEAD_DIM),
        "self_attn.q_proj": np.zeros((width, size)), "self_attn.k_proj": np.zeros((width, size)),
        "self_attn.v_proj": np.zeros((width, size)), "self_attn.o_proj": np.zeros((size, width)),
        "mlp.gate_proj": np.zeros((inner, size)), "mlp.up_proj": np.zeros((inner, size)),
        "mlp.down_proj": np.zeros((size, inner)),
    }  # fmt: skip
    tensors = {f"model.layers.0.{name}.weight": value.astype(np.float32) for name, value in layer.items()}
    tensors |= {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(size, np.float32),
        "lm_head.weight": head,
    }
    save_file(tensors, str(directory / "model.safetensors"), {"format": "pt"})


def _write_configs(directory: Path, size: int, template: str, tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id(END)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": size, "hidden_size": size,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": _HEADS, "num_key_value_heads": _HEADS,
        "head_dim": _HEAD_DIM, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "dtype": "float32", "eos_token_id": end, "hidden_act": "silu",
    }  # fmt: skip
    of_tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False, "model_max_length": 4096,
    }  # fmt: skip
    for name, value in (
        ("config", config),
        ("tokenizer_config", of_tokenizer),
        ("generation_config", {"eos_token_id": end, "pad_token_id": tokenizer.token_to_id("<|pad|>")}),
    ):
        (directory / f"{name}.json").write_text(json.dumps(value))
    (directory / "chat_template.jinja").write_text(template)
