"""A checkpoint's tokenizer encodes as transformers' does, and byte tokens make the text that its decoder makes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

import trtx
from trtx.checkpoint import resolve_checkpoint
from trtx.stop_strings import PlainText
from trtx.text import TextStream, byte_tokens, load_decoder, load_tokenizer
from trtx.torch_engine.llmapi.choices import find_stops
from trtx.torch_engine.llmapi.sampling import SamplingParams

pytestmark = pytest.mark.slow

ROOT = Path(trtx.__file__).parent
SPECIAL = "</s>"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve_checkpoint("synthetic:tiny").path, tmp_path / "model"))


@pytest.mark.parametrize("setting", ["padding", "truncation", "both"])
def test_padding_and_truncation_that_were_saved_are_off(model: Path, setting: str) -> None:
    from transformers import AutoTokenizer

    saved = Tokenizer.from_file(str(model / "tokenizer.json"))
    if setting != "truncation":
        saved.enable_padding(length=96, pad_id=0, pad_token="<|pad|>")
    if setting != "padding":
        saved.enable_truncation(max_length=4)
    saved.save(str(model / "tokenizer.json"))
    text = "one two three four five six seven eight"
    expected = AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    assert load_tokenizer(model).encode(text).ids == expected
    assert load_decoder(model).encode(text).ids == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "LlamaTokenizer", "Qwen2Tokenizer"])
def test_tokenizer_json_alone_is_enough_for_every_class(model: Path, name: str) -> None:
    from transformers import AutoTokenizer

    path = model / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": name}))
    assert load_tokenizer(model).encode("one two").ids == AutoTokenizer.from_pretrained(model)("one two")["input_ids"]


def test_one_place_reads_tokenizer_files() -> None:
    """Any other would keep padding and truncation, or encode otherwise than transformers."""
    readers = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if re.search(r"(?<!Auto)\bTokenizer\.from_(file|str|pretrained)\(", path.read_text(encoding="utf-8"))
    }
    assert readers <= {"text.py"}, "ask trtx.text for it"


def bytes_tokenizer() -> Any:
    """As Llama 2's: words, and a token for each byte."""
    vocabulary = {"<unk>": 0, "<s>": 1, SPECIAL: 2}
    for token in (*(f"<0x{value:02X}>" for value in range(256)), "\u2581ok", "\u2581", "x", "\u2581bye"):
        vocabulary[token] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", SPECIAL)])
    return tokenizer


TOKENIZER = bytes_tokenizer()
BYTES = byte_tokens(TOKENIZER)
EURO = [TOKENIZER.token_to_id(f"<0x{value:02X}>") for value in "\N{EURO SIGN}".encode()]
ANY = st.sampled_from([*EURO, *EURO, *range(2, TOKENIZER.get_vocab_size())])


@given(st.lists(ANY, max_size=16), st.booleans(), st.integers(1, 5))
def test_pieces_of_byte_tokens_join_to_the_decoding_of_the_whole(ids: list[int], skips: bool, chunk: int) -> None:
    text = PlainText(TextStream(TOKENIZER, skip_special_tokens=skips))
    released = [text.feed(ids[at : at + chunk], is_last=False) for at in range(0, len(ids), chunk)]
    released.append(text.feed([], is_last=True))
    assert "".join(one.text for one in released) == TOKENIZER.decode(ids, skip_special_tokens=skips)
    assert sum(len(one.pieces) for one in released) == len(ids)


@given(st.lists(ANY, max_size=16), st.booleans())
def test_stop_strings_of_the_llm_api_leave_the_text_as_it_is(ids: list[int], skips: bool) -> None:
    stops = find_stops(SamplingParams(stop=["no such text"], skip_special_tokens=skips), TOKENIZER)
    assert stops is not None
    text = "".join([*(stops.feed([one], is_last=False).text for one in ids), stops.feed([], is_last=True).text])
    assert text == TOKENIZER.decode(ids, skip_special_tokens=skips)


def test_a_long_run_of_whole_characters_does_not_wait_for_its_end() -> None:
    text = PlainText(TextStream(TOKENIZER, skip_special_tokens=True))
    shown = "".join(text.feed([token], is_last=False).text for token in EURO * 20)
    assert shown == "\N{EURO SIGN}" * len(shown) and len(shown) >= 14


def test_only_decoders_with_byte_fallback_have_byte_tokens() -> None:
    assert BYTES is not None and len(BYTES.values) == 256
    assert byte_tokens(load_decoder(resolve_checkpoint("synthetic:tiny").path)) is None
    assert byte_tokens(None) is None
