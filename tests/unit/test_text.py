"""Detokenization in pieces and stop strings, over a byte-level tokenizer made here."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from trtx.errors import UsageError
from trtx.stop_strings import StopStrings
from trtx.text import TextStream, load_tokenizer

ALPHABET = ["a", "b", "c", " ", "ab", "bc", "abc", "é", "日"]


def _byte_letters() -> dict[int, str]:
    """GPT-2's printable letter for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {byte: chr(byte) for byte in printable}
    extra = 256
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(extra)
            extra += 1
    return letters


LETTERS = _byte_letters()


def _tokenizer() -> Tokenizer:
    vocab = {LETTERS[byte]: byte for byte in range(256)}
    for text in ALPHABET:
        vocab.setdefault("".join(LETTERS[byte] for byte in text.encode()), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


TOKENIZER = _tokenizer()
END = TOKENIZER.token_to_id("<end>")


def ids(*pieces: str) -> list[int]:
    return [i for piece in pieces for i in ([END] if piece == "<end>" else [_id(piece)])]


def _id(text: str) -> int:
    found = TOKENIZER.token_to_id("".join(LETTERS[byte] for byte in text.encode()))
    assert found is not None, text
    return int(found)


def stream() -> TextStream:
    return TextStream(TOKENIZER, skip_special_tokens=True)


@settings(max_examples=examples(200), deadline=None)
@given(st.text(max_size=30), st.lists(st.integers(1, 5), min_size=40, max_size=40))
def test_pieces_join_to_the_decoding_of_the_whole(text: str, cuts: list[int]) -> None:
    tokens = list(text.encode())  # a token a byte: every character longer than one byte is split
    pieces = stream()
    shown, at = "", 0
    for cut in cuts:
        shown += pieces.feed(tokens[at : at + cut])
        at += cut
        assert text.startswith(shown)
    shown += pieces.feed(tokens[at:]) + pieces.finish()
    assert shown == TOKENIZER.decode(tokens)


def test_half_a_character_is_shown_only_at_the_end() -> None:
    pieces = stream()
    assert pieces.feed(list("é".encode())[:1]) == ""
    assert pieces.finish() == "\N{REPLACEMENT CHARACTER}"


def test_bytes_that_never_become_text_do_not_wait_for_ever() -> None:
    pieces = stream()
    assert pieces.feed([0x80] * 100) != ""


def test_special_tokens_show_as_nothing_and_keep_nothing_waiting() -> None:
    pieces = stream()
    assert pieces.feed(ids("a", "<end>")) + pieces.feed(ids("<end>", "b")) == "ab"


def run(
    stops: list[str], pieces: list[str], *, include: bool = False, min_tokens: int = 0, cut: int = 1
) -> tuple[list[int], str, str | None]:
    """Feeds ``cut`` tokens at a time: tokens given out, text given out, the stop that matched."""
    tokens = ids(*pieces)
    finder = StopStrings(stops, stream(), include=include, min_tokens=min_tokens)
    given, text = 0, ""
    for at in range(0, len(tokens), cut):
        released = finder.feed(tokens[at : at + cut], is_last=at + cut >= len(tokens))
        given += len(released.pieces)
        text += released.text
        if released.stop is not None:
            return tokens[:given], text, released.stop
    return tokens[:given], text, None


@pytest.mark.parametrize("cut", [1, 2, 10])
def test_a_match_across_tokens_ends_tokens_and_text_before_it(cut: int) -> None:
    assert run(["bca"], ["a", "b", "c", "a", "b"], cut=cut) == (ids("a"), "a", "bca")


def test_a_token_that_only_ends_in_the_stop_string_is_kept_and_the_text_is_exact() -> None:
    assert run(["c"], ["a", "abc", "a"]) == (ids("a", "abc"), "aab", "c")


def test_include_gives_the_stop_string_out_too() -> None:
    assert run(["bc"], ["a", "b", "c", "a"], include=True) == (ids("a", "b", "c"), "abc", "bc")


def test_what_may_begin_a_stop_string_is_held_back_and_given_out_when_it_does_not() -> None:
    finder = StopStrings(["abca"], stream(), include=False, min_tokens=0)
    seen = [finder.feed(ids(piece), is_last=False) for piece in ("c", "ab", "c", "b")]
    assert [(len(r.pieces), r.text) for r in seen] == [(1, "c"), (0, ""), (0, ""), (3, "abcb")]


def test_a_token_goes_with_all_of_its_text() -> None:
    """Whoever goes on behind the tokens that were given out, where a worker died, would lose the rest of it."""
    finder = StopStrings(["cc"], stream(), include=False, min_tokens=0)
    seen = [finder.feed(ids(piece), is_last=False) for piece in ("a", "abc", "b")]
    assert [(len(r.pieces), r.text) for r in seen] == [(1, "a"), (0, ""), (2, "abcb")]


@settings(max_examples=examples(200), deadline=None)
@given(
    tokens=st.lists(st.integers(0, len(ALPHABET) + 255), min_size=1, max_size=20),
    stops=st.lists(st.text(alphabet="abc é", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_that_was_given_out_is_that_of_the_tokens(tokens: list[int], stops: list[str]) -> None:
    finder = StopStrings(stops, stream(), include=False, min_tokens=0)
    given, text = 0, ""
    for token in tokens:
        released = finder.feed([token], is_last=False)
        given, text = given + len(released.pieces), text + released.text
        if released.stop is not None:
            return
        assert text == TOKENIZER.decode(tokens[:given])
        assert "".join(released.pieces) == released.text


def test_what_is_held_at_the_end_is_given_out() -> None:
    assert run(["abca"], ["c", "ab", "c"]) == (ids("c", "ab", "c"), "cabc", None)


def test_the_earliest_of_several_stop_strings_wins() -> None:
    assert run(["ca", "bc"], ["a", "b", "c", "a"], cut=4) == (ids("a"), "a", "bc")


def test_min_tokens_lets_early_matches_pass() -> None:
    assert run(["b"], ["a", "b", "c", "b"], min_tokens=2) == (ids("a", "b", "c"), "abc", "b")


def test_a_stop_string_with_split_characters_is_found() -> None:
    tokens = list("x日y日".encode())
    finder = StopStrings(["日"], stream(), include=False, min_tokens=0)
    released = [finder.feed([token], is_last=False) for token in tokens[:4]]
    assert released[-1].stop == "日"
    assert sum(len(r.pieces) for r in released) == 1
    assert "".join(r.text for r in released) == "x"


@settings(max_examples=examples(300), deadline=None)
@given(
    pieces=st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=20),
    stops=st.lists(st.text(alphabet="abc é", min_size=1, max_size=4), min_size=1, max_size=3),
    cut=st.integers(1, 4),
    include=st.booleans(),
)
def test_no_part_of_a_stop_string_is_ever_given_out(
    pieces: list[str], stops: list[str], cut: int, include: bool
) -> None:
    whole = "".join(pieces)
    tokens, text, stop = run(stops, pieces, cut=cut, include=include)
    found = [(at + len(s), at, s) for s in stops if (at := whole.find(s)) >= 0]
    if not found:
        assert (tokens, text, stop) == (ids(*pieces), whole, None)
        return
    assert stop in stops
    at = len(text) - len(stop) if include else len(text)
    assert whole[at : at + len(stop)] == stop
    assert not any(s in text[: at + len(stop) - 1] for s in stops if not include)
    starts = [len("".join(pieces[:index])) for index in range(len(pieces))]
    end = at + len(stop) if include else at
    assert tokens == ids(*[piece for piece, start in zip(pieces, starts, strict=True) if start < end])


@pytest.mark.parametrize("content", ["", "{", '{"model": 5}'])
def test_a_broken_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UsageError, match=r"tokenizer\.json can't be read as a tokenizer"):
        load_tokenizer(tmp_path)
