"""Answers of byte tokens that are no UTF-8 come whole, with transformers' own text, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import HTTP, Topology, topology
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.proof  # test_text.py has the bytes, test_worker_torch.py a stop string and log-probabilities

PROMPTS = ("ab", "b a", "ca", "a b c")
TOKENS = 24


def checkpoint(directory: Path) -> Path:
    """Random weights over a vocabulary that is nearly all byte tokens."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for token in (*(f"<0x{value:02X}>" for value in range(256)), "\u2581", "a", "b", "c", "\u2581ok", "\u2581bye"):
        vocabulary[token] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in vocabulary if "s>" in token]
    )
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, initializer_range=0.6,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ '' + m['content'] }}{% endfor %}")
    return directory


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    model = checkpoint(tmp_path_factory.mktemp("bytes"))
    with topology(tmp_path_factory.mktemp("served"), model) as found:
        found.extra_environment["DYN_LOG"] = "warn"
        found.start_frontend()
        found.start_worker(engine="torch")
        found.wait_ready(aggregated=1)
        yield found


@pytest.fixture(scope="module")
def texts(running: Topology) -> dict[str, str]:
    """What transformers generates behind each prompt."""
    tokenizer: Any = AutoTokenizer.from_pretrained(running.model)
    model = AutoModelForCausalLM.from_pretrained(running.model, dtype=torch.float32)
    found = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS)
        before = tokenizer.decode(ids[0], skip_special_tokens=True)
        found[prompt] = tokenizer.decode(made[0], skip_special_tokens=True)[len(before) :]
    assert all("\N{REPLACEMENT CHARACTER}" in text for text in found.values()), "the model writes ill-formed text"
    return found


@pytest.mark.parametrize("extra", [{}, {"logprobs": 2}, {"stop": ["never"]}], ids=["plain", "logprobs", "stop"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_text_is_transformers_own(running: Topology, texts: dict[str, str], prompt: str, extra: dict[str, Any]) -> None:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, **extra}
    answer = HTTP.post(f"{running.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["text"] == texts[prompt] and choice["finish_reason"]
    if "logprobs" in extra:
        assert "".join(choice["logprobs"]["tokens"]) == texts[prompt]
    streamed, reason = "", None
    with HTTP.stream("POST", f"{running.url}/v1/completions", json={**body, "stream": True}, timeout=60) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                (part,) = json.loads(line.removeprefix("data: "))["choices"]
                streamed += part["text"]
                reason = part.get("finish_reason") or reason
    assert streamed == texts[prompt] and reason == choice["finish_reason"]
