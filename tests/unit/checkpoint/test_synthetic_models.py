"""Synthetic checkpoints are what transformers, tokenizers and a chat client take them for."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from trtx.checkpoint import list_shapes, resolve_checkpoint
from trtx.checkpoint.text import sentences

pytestmark = pytest.mark.slow

HEAD_DIMS = {
    "synthetic:tiny": 32,
    "synthetic:tiny-trained": 64,
    "synthetic:tiny-tools": 32,
    "synthetic:tiny-qwen2": 64,
    "synthetic:tiny-llama": 32,
    "synthetic:tiny-moe": 32,
    "synthetic:tiny-gpt-oss": 32,
    "synthetic:tiny-vl": 32,
    "synthetic:tiny-vl-trained": 32,
    "synthetic:tiny-gemma3": 32,
    "synthetic:tiny-qwen2.5-vl": 32,
    "synthetic:tiny-qwen3-vl": 32,
    "synthetic:qwen3-0.6b": 128,
    "synthetic:qwen3-1.7b": 128,
    "synthetic:qwen3-8b": 128,
    "synthetic:qwen3-32b": 128,
    "synthetic:qwen3-30b-a3b": 128,
    "synthetic:gpt-oss-20b": 64,
    "synthetic:gemma-3-1b": 256,
    "synthetic:llama-3.1-8b": 128,
    "synthetic:mistral-7b": 128,
    "synthetic:qwen2.5-7b": 128,
    "synthetic:qwen2.5-vl-7b": 128,
}
LIKE_ANOTHER = {  # of the family of another one of the list, with other sizes
    "synthetic:qwen3-1.7b", "synthetic:qwen3-8b", "synthetic:qwen3-32b", "synthetic:qwen3-30b-a3b",
    "synthetic:gpt-oss-20b", "synthetic:gemma-3-1b", "synthetic:llama-3.1-8b", "synthetic:qwen2.5-7b",
    "synthetic:qwen2.5-vl-7b",
}  # fmt: skip
SEEING = ["synthetic:tiny-vl", "synthetic:tiny-vl-trained", "synthetic:tiny-qwen2.5-vl", "synthetic:tiny-qwen3-vl"]
PLAIN = ["synthetic:tiny", "synthetic:tiny-qwen2", "synthetic:tiny-llama", "synthetic:tiny-trained", *SEEING]
STORED = [*PLAIN, "synthetic:tiny-tools", "synthetic:tiny-moe", "synthetic:tiny-gpt-oss", "synthetic:tiny-gemma3"]
PLACEHOLDERS = {
    "llava": "<image>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("cache")


@functools.cache
def tokenizer_of(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(path)


def test_every_shape_is_listed_and_tested() -> None:
    assert {name for name, _ in list_shapes()} == set(HEAD_DIMS)


def model_class(config: Any) -> Any:
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.proof if one in LIKE_ANOTHER else ()) for one in HEAD_DIMS]
)
def test_transformers_reads_the_config_as_we_do(name: str, cache: Path) -> None:
    checkpoint = resolve_checkpoint(name, cache_dir=cache)
    config = AutoConfig.from_pretrained(checkpoint.path)
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    assert head_dim == HEAD_DIMS[name]
    assert config.architectures == [checkpoint.architecture]
    assert text.max_position_embeddings == checkpoint.context_length
    with torch.device("meta"):
        model = model_class(config).from_config(config)
    if not checkpoint.has_weights:
        count = sum(p.numel() for p in model.parameters())
        assert checkpoint.weight_bytes == count * getattr(torch, checkpoint.dtype).itemsize


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.proof if one in LIKE_ANOTHER else ()) for one in HEAD_DIMS]
)
def test_the_tokenizer_has_text_for_every_id_of_the_model(name: str, cache: Path) -> None:
    checkpoint = resolve_checkpoint(name, cache_dir=cache)
    tokenizer = tokenizer_of(checkpoint.path)
    config = AutoConfig.from_pretrained(checkpoint.path)
    vocab_size = config.get_text_config().vocab_size
    assert len(tokenizer) == vocab_size
    pieces = tokenizer.batch_decode([[id_] for id_ in range(0, vocab_size, 97)])
    assert all(pieces)
    eos = config.get_text_config().eos_token_id
    assert tokenizer.convert_ids_to_tokens(eos) == tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize("name", STORED)
def test_stored_weights_give_finite_logits(name: str, cache: Path) -> None:
    path = resolve_checkpoint(name, cache_dir=cache).path
    own_class = model_class(AutoConfig.from_pretrained(path))
    model, report = own_class.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = tokenizer_of(path)("To be, or not to be: 42", return_tensors="pt").input_ids
    with torch.inference_mode():
        assert torch.isfinite(model(ids).logits).all()


def test_a_random_model_speaks_in_words_and_does_not_stop(cache: Path) -> None:
    path = resolve_checkpoint("synthetic:tiny", cache_dir=cache).path
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), tokenizer_of(path)
    for prompt in ("The king of France", "a b c d", "12345"):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        output = model.generate(ids, max_new_tokens=64, do_sample=False)[0, ids.shape[1] :]
        assert len(output) == 64
        assert len(set(output.tolist())) > 8
        # A load generator counts the tokens of an answer by tokenizing it: it finds as many as the model made.
        assert len(tokenizer.encode(tokenizer.decode(output))) == 64


@settings(max_examples=examples(60), deadline=None)
@given(text=st.text(max_size=60))
def test_text_survives_the_tokenizer(text: str, tokenizers: dict[str, object]) -> None:
    for tokenizer in tokenizers.values():
        ids = tokenizer.encode(text, add_special_tokens=False)  # type: ignore[attr-defined]
        assert tokenizer.decode(ids) == text  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def tokenizers(cache: Path) -> dict[str, object]:
    names = ("synthetic:tiny", "synthetic:tiny-trained", "synthetic:tiny-tools")
    return {name: tokenizer_of(resolve_checkpoint(name, cache_dir=cache).path) for name in names}


@pytest.mark.parametrize("name", ["synthetic:tiny", "synthetic:qwen2.5-7b", "synthetic:tiny-trained"])
def test_a_prompt_of_wanted_length_stays_near_it_as_text(name: str, cache: Path) -> None:
    tokenizer = tokenizer_of(resolve_checkpoint(name, cache_dir=cache).path)
    ids = tokenizer.encode("".join(sentences(7, 400)), add_special_tokens=False)
    for start in range(0, 2000, 100):
        prompt = tokenizer.decode(ids[start : start + 128])
        assert abs(len(tokenizer.encode(prompt, add_special_tokens=False)) - 128) <= 2


@pytest.mark.parametrize("name", SEEING)
def test_the_chat_template_has_one_placeholder_a_picture_where_it_stands(name: str, cache: Path) -> None:
    path = resolve_checkpoint(name, cache_dir=cache).path
    tokenizer, config = tokenizer_of(path), AutoConfig.from_pretrained(path)
    picture, text = {"type": "image"}, {"type": "text", "text": "and"}
    conversation = [
        {"role": "user", "content": [picture, text, picture]},
        {"role": "assistant", "content": "Well."},
        {"role": "user", "content": [text, picture]},
    ]
    said = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    numbers = ("1", "2", "3") if name == "synthetic:tiny-vl-trained" else ("", "", "")
    first, second, third = (number + PLACEHOLDERS[config.model_type] for number in numbers)
    assert said == (
        f"<|im_start|>user\n{first}and{second}<|im_end|>\n<|im_start|>assistant\nWell.<|im_end|>\n"
        f"<|im_start|>user\nand{third}<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(said, add_special_tokens=False)
    assert ids.count(config.image_token_id) == 3


@pytest.mark.parametrize("name", PLAIN)
def test_the_chat_template_renders_a_conversation(name: str, cache: Path) -> None:
    tokenizer = tokenizer_of(resolve_checkpoint(name, cache_dir=cache).path)
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(text)[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
