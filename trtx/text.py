"""Between tokens and text: incremental detokenization, and stop strings with hold-back."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from trtx.errors import UsageError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CHARACTER_BYTES = 4
"""Of a character in UTF-8 at most, and so the most tokens that one can be spread over."""
_LONGEST_WAIT = 16
"""Tokens that may wait for the rest of a character. Where more do, the earlier ones are no text, and shown as such."""


class Tokenizer(Protocol):
    """The part of ``tokenizers.Tokenizer`` that the engine uses."""

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Any: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Loads the fast tokenizer of a checkpoint so that it encodes as transformers does: ``encode(text)`` adds the
    begin-of-text token where the checkpoint wants one, and padding and truncation that a training run left in
    ``tokenizer.json`` are off.

    Every part of trtx that encodes text with a checkpoint's tokenizer loads it here. transformers, whose import takes
    seconds, is asked only where it may encode otherwise than ``tokenizer.json`` does: see :func:`is_encoded_by_file`.
    Raises UsageError that names the file where it can't be read.
    """
    if not (model_dir / "tokenizer.json").is_file():
        return fast_tokenizer(load_hf_tokenizer(model_dir))
    decoder = load_decoder(model_dir)
    if is_encoded_by_file(model_dir):
        return decoder
    try:
        return fast_tokenizer(load_hf_tokenizer(model_dir))
    except Exception as error:  # transformers raises errors of many classes
        raise UsageError(
            f"transformers can't load the tokenizer of {model_dir} ({str(error)[:200]}); download the checkpoint again"
        ) from error


def load_decoder(model_dir: Path) -> Tokenizer:
    """Loads the tokenizer of ``tokenizer.json`` alone, without padding and truncation, and never imports transformers.

    For parts that turn tokens into text: :func:`load_tokenizer` is for those that encode. Raises UsageError that names
    the file where it can't be read.
    """
    from tokenizers import Tokenizer as FastTokenizer

    path = model_dir / "tokenizer.json"
    try:
        return _whole(FastTokenizer.from_file(str(path)))
    except Exception as error:  # the package raises no class of its own
        raise UsageError(
            f"{path} can't be read as a tokenizer ({str(error)[:200]}); download the checkpoint again"
        ) from error


def is_encoded_by_file(model_dir: Path) -> bool:
    """Whether transformers encodes text exactly as ``tokenizer.json`` says.

    transformers 5 builds the tokenizers of many model families anew, from the vocabulary and its own code. It takes the
    file as it is where ``tokenizer_config.json`` names the class that no family owns. Even then ``add_bos_token`` and
    ``add_eos_token`` change what it adds, and tokens of ``added_tokens_decoder`` are added to the file's own.
    """
    try:
        config = json.loads((model_dir / "tokenizer_config.json").read_bytes())
        if config.get("tokenizer_class") not in _FILE_CLASSES or config.get("auto_map"):
            return False
        if config.get("add_bos_token") or config.get("add_eos_token"):
            return False
        state = json.loads((model_dir / "tokenizer.json").read_bytes())
        in_file = {str(token["id"]): token for token in state.get("added_tokens", ())}
        named = config.get("added_tokens_decoder") or {}
        return all(_is_same_token(token, in_file.get(str(id_))) for id_, token in named.items())
    except (OSError, ValueError, AttributeError, LookupError, TypeError):
        return False


def pads_or_truncates(model_dir: Path) -> bool:
    """Whether ``tokenizer.json`` holds padding or truncation, as a training run leaves them."""
    state = json.loads((model_dir / "tokenizer.json").read_bytes())
    return bool(state.get("padding") or state.get("truncation"))


@contextlib.contextmanager
def torch_hidden() -> Iterator[None]:
    """For an import of transformers, which imports torch where it is installed: 2 s of CPU that a tokenizer does not
    need (seen with 5.23). transformers treats torch as absent from then on, in the whole process."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # as if it was not installed
    try:
        yield
    finally:
        del sys.modules["torch"]


def load_hf_tokenizer(model_dir: Path, *, trust_remote_code: bool = False) -> Any:
    """Raises UsageError, naming the directory, where transformers loads no tokenizer from it, or an empty one: of
    some families (Qwen2, 5.23) it makes one without a vocabulary where a directory has no file of it."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(model_dir), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        # transformers writes advice over several lines, whatever the cause.
        raise _no_tokenizer(model_dir, " ".join(str(error).split())[:150]) from error
    files = getattr(type(loaded), "vocab_files_names", {}).values()  # GPT-2's lack tokenizer.json, which it reads
    if model_dir.is_dir() and files and not any((model_dir / name).is_file() for name in ("tokenizer.json", *files)):
        raise _no_tokenizer(model_dir, f"it lacks {' and '.join(files)}")
    return loaded


def _no_tokenizer(model_dir: Path, reason: str) -> UsageError:
    return UsageError(
        f"{model_dir} has no tokenizer that transformers can load ({reason}); add the tokenizer.json of the "
        "checkpoint, or set skip_tokenizer_init and send token ids"
    )


def fast_tokenizer(tokenizer: Any) -> Tokenizer:
    """The ``tokenizers.Tokenizer`` inside a transformers tokenizer, without padding and truncation. Raises ValueError
    where there is none."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"tokenizer {type(tokenizer).__name__} has no fast form; expected one with a tokenizer.json")
    return _whole(backend)


@dataclass(frozen=True, slots=True)
class ByteTokens:
    """The byte tokens of a tokenizer with byte fallback, such as ``<0xE4>``: ids to byte values.

    ``skipped``: special tokens, which leave no gap between byte tokens where the text is made without them.
    """

    values: Mapping[int, int]
    skipped: frozenset[int]


def byte_tokens(tokenizer: Any) -> ByteTokens | None:
    """The byte tokens that a decoder such as Llama 2's, Mistral's or Gemma's joins into characters; None for a decoder
    without byte fallback. Kept for the next call, since each answer asks."""
    return _byte_tokens(tokenizer)


@lru_cache(maxsize=8)
def _byte_tokens(tokenizer: Any) -> ByteTokens | None:
    decoder = getattr(tokenizer, "decoder", None)
    if decoder is None or not _has_byte_fallback(json.loads(decoder.__getstate__())):
        return None
    named = {tokenizer.token_to_id(f"<0x{value:02X}>"): value for value in range(256)}
    named.pop(None, None)
    added = tokenizer.get_added_tokens_decoder()
    return ByteTokens(named, frozenset(id_ for id_, token in added.items() if token.special))


_FILE_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


def _whole(tokenizer: Any) -> Tokenizer:
    tokenizer.no_padding()
    tokenizer.no_truncation()
    whole: Tokenizer = tokenizer
    return whole


def _whole_characters(data: bytes) -> int:
    """How many bytes at the beginning of ``data`` are whole characters; all where the rest is no UTF-8 anyway."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        is_cut_off = error.end == len(data) and error.reason == "unexpected end of data"
        return error.start if is_cut_off and error.start else len(data)
    return len(data)


def _is_same_token(token: Any, in_file: Any) -> bool:
    flags = ("content", "lstrip", "rstrip", "normalized", "single_word")
    return in_file is not None and all(token.get(flag, False) == in_file.get(flag, False) for flag in flags)


def _has_byte_fallback(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    return decoder.get("type") == "ByteFallback" or any(map(_has_byte_fallback, decoder.get("decoders") or ()))


class TextStream:
    """Turns tokens into text as they come; a character whose bytes are not all there yet waits for them.

    Each piece is decoded together with the tokens before it that it may lean on, so that the pieces join to the
    decoding of the whole (spaces and multi-byte characters included).
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        """The decoder of a tokenizer with byte tokens shows a run of them that is not UTF-8 as a whole as one
        replacement character a token, so a run waits until it has ended."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._bytes = byte_tokens(tokenizer)
        self._context: list[int] = []  # tokens of the last piece
        self._new: list[int] = []  # tokens whose text was not given out

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that is sure now; may be empty."""
        self._new += token_ids
        new = self._new
        if self._bytes is not None:
            return self._feed_runs(self._bytes)
        for held in range(min(_CHARACTER_BYTES, len(new))):
            piece = self._piece(len(new) - held)
            is_junk = held == _CHARACTER_BYTES - 1 and len(new) > _LONGEST_WAIT
            if not piece.endswith(REPLACEMENT) or is_junk:
                sure = new[: len(new) - held]
                self._context, self._new = (sure if piece else self._context), new[len(sure) :]
                return piece
        return ""

    def _feed_runs(self, byte_tokens: ByteTokens) -> str:
        new = self._new
        start = count = self._run_start(byte_tokens)
        if len(new) - start > _LONGEST_WAIT:  # characters that are whole need not wait for ever
            run = [(at, byte_tokens.values[new[at]]) for at in range(start, len(new)) if new[at] in byte_tokens.values]
            whole = _whole_characters(bytes(value for _, value in run))
            count = run[whole][0] if whole < len(run) else len(new)
        if not count:
            return ""
        piece = self._piece(count)
        # A run that goes on is decoded anew from here: with what came before, all of it could turn out to be no UTF-8.
        self._context, self._new = new[:start] or self._context, new[count:]
        return piece

    def _run_start(self, byte_tokens: ByteTokens) -> int:
        """Where the byte tokens begin that end what was not given out."""
        skipped = byte_tokens.skipped if self._skip_special_tokens else frozenset()
        start = len(self._new)
        while start and (self._new[start - 1] in byte_tokens.values or self._new[start - 1] in skipped):
            start -= 1
        return start

    def finish(self) -> str:
        """What waited for bytes that never came, as the tokenizer shows it."""
        piece = self._piece(len(self._new)) if self._new else ""
        context = self._new if self._bytes is None else self._new[: self._run_start(self._bytes)]
        self._context, self._new = context or self._context, []
        return piece

    def _piece(self, count: int) -> str:
        """Text of the first ``count`` new tokens."""
        decode, skip = self._tokenizer.decode, self._skip_special_tokens
        return decode(self._context + self._new[:count], skip)[len(decode(self._context, skip)) :]


@dataclass(frozen=True, slots=True)
class Released:
    """Tokens and text that no stop string can take back. ``stop`` is the one that matched, which ends the sequence.

    ``pieces``: of each token what it adds to the text, "" where a character lacks bytes yet. They join to the text, but
    for the last one of a match, which may reach into the stop string."""

    pieces: tuple[str, ...]
    text: str
    stop: str | None = None


class PlainText:
    """Makes the text of a sequence without stop strings, piece by piece, for the callers of :class:`StopStrings`."""

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream

    def feed(self, token_ids: Sequence[int], *, is_last: bool) -> Released:
        """Gives every token out at once, each with the text that it completes."""
        pieces = [self._stream.feed([token_id]) for token_id in token_ids]
        if is_last and (rest := self._stream.finish()):
            if not pieces:
                return Released((), rest)
            pieces[-1] += rest
        return Released(tuple(pieces), "".join(pieces))


class StopStrings:
    """Finds stop strings across token borders, and holds back whatever may turn out to begin one.

    On a match the tokens end before the first one that lies wholly in or behind the stop string; the text ends exactly
    where the stop string begins (or ends, with ``include``).
    """

    def __init__(self, stops: Sequence[str], stream: TextStream, *, include: bool, min_tokens: int) -> None:
        self._stops = tuple(stops)
        self._stream = stream
        self._include = include
        self._min_tokens = min_tokens
        self._longest = max(map(len, stops))
        self._text = ""
        self._num_tokens = 0
        self._searchable = 0  # a match begins here at the earliest
        self._given = 0  # characters given out
        self._held: list[int] = []  # for each held token the character it starts at

    def feed(self, token_ids: Sequence[int], *, is_last: bool) -> Released:
        """``is_last``: nothing comes after; what is held is given out unless it is a stop string."""
        for token_id in token_ids:
            before = len(self._text)
            self._held.append(before)
            self._num_tokens += 1
            self._text += self._stream.feed([token_id])
            if len(self._text) > before and (found := self._find(before)) is not None:
                return self._match(*found)
        if is_last:
            before = len(self._text)
            self._text += self._stream.finish()
            if len(self._text) > before and (found := self._find(before)) is not None:
                return self._match(*found)
            return self._release(len(self._text) + 1, len(self._text))
        safe = self._token_border(self._hold_from())
        return self._release(safe, safe)

    def _find(self, before: int) -> tuple[int, str] | None:
        if self._num_tokens <= self._min_tokens:
            self._searchable = len(self._text)
            return None
        start = max(self._searchable, before - self._longest + 1)
        found = [(at, stop) for stop in self._stops if (at := self._text.find(stop, start)) >= 0]
        return min(found, default=None)

    def _match(self, at: int, stop: str) -> Released:
        if self._include:
            released = self._release(at + len(stop), at + len(stop))
        else:
            released = self._release(at, at)
        return Released(released.pieces, released.text, stop)

    def _hold_from(self) -> int:
        """Where the longest suffix begins that some stop string begins with."""
        text = self._text
        for start in range(max(self._searchable, len(text) - self._longest + 1), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(text)

    def _token_border(self, at: int) -> int:
        """Where the token begins in whose text character ``at`` is: who goes on behind tokens that were given out, as
        another worker may, takes all of their text for seen."""
        if at == len(self._text) or at in self._held:
            return at
        return max(start for start in self._held if start < at)

    def _release(self, tokens_before: int, text_before: int) -> Released:
        """Gives out held tokens that start before one character, and text up to another."""
        count = 0
        while count < len(self._held) and self._held[count] < tokens_before:
            count += 1
        starts = [*self._held[:count], *(self._held[count : count + 1] or [len(self._text)])]
        del self._held[:count]
        text = self._text[self._given : text_before]
        self._given = max(self._given, text_before)
        return Released(tuple(self._text[begin:end] for begin, end in pairwise(starts)), text)
