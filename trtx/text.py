"""Between tokens and text: incremental detokenization, and stop strings with hold-back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    """The fast tokenizer of a checkpoint, without transformers' 2 s import where ``tokenizer.json`` is there.

    Raises UsageError, naming the file, for one that is none.
    """
    path = model_dir / "tokenizer.json"
    if path.is_file():
        from tokenizers import Tokenizer as FastTokenizer

        try:
            loaded: Tokenizer = FastTokenizer.from_file(str(path))
        except Exception as error:  # the package raises no class of its own
            raise UsageError(
                f"{path} can't be read as a tokenizer ({str(error)[:200]}); download the checkpoint again"
            ) from error
        return loaded
    return fast_tokenizer(load_hf_tokenizer(model_dir))


def load_hf_tokenizer(model_dir: Path, *, trust_remote_code: bool = False) -> Any:
    """Raises UsageError, naming the directory, where transformers loads no tokenizer from it, or an empty one: of
    some families (Qwen2, 5.23) it makes one without a vocabulary where a directory has no file of it."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(model_dir), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        # transformers writes advice over several lines, whatever the cause.
        raise _no_tokenizer(model_dir, " ".join(str(error).split())[:150]) from error
    files = getattr(type(loaded), "vocab_files_names", {}).values()
    if model_dir.is_dir() and files and not any((model_dir / name).is_file() for name in files):
        raise _no_tokenizer(model_dir, f"it lacks {' and '.join(files)}")
    return loaded


def _no_tokenizer(model_dir: Path, reason: str) -> UsageError:
    return UsageError(
        f"{model_dir} has no tokenizer that transformers can load ({reason}); add the tokenizer.json of the "
        "checkpoint, or set skip_tokenizer_init and send token ids"
    )


def fast_tokenizer(tokenizer: Any) -> Tokenizer:
    """The ``tokenizers.Tokenizer`` inside a transformers tokenizer. Raises ValueError where there is none."""
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"tokenizer {type(tokenizer).__name__} has no fast form; expected one with a tokenizer.json")
    return backend


class TextStream:
    """Turns tokens into text as they come; a character whose bytes are not all there yet waits for them.

    Each piece is decoded together with the tokens before it that it may lean on, so that the pieces join to the
    decoding of the whole (spaces and multi-byte characters included).
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []  # tokens of the last piece
        self._new: list[int] = []  # tokens whose text was not given out

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that is sure now; may be empty."""
        self._new += token_ids
        new = self._new
        for held in range(min(_CHARACTER_BYTES, len(new))):
            piece = self._piece(len(new) - held)
            is_junk = held == _CHARACTER_BYTES - 1 and len(new) > _LONGEST_WAIT
            if not piece.endswith(REPLACEMENT) or is_junk:
                sure = new[: len(new) - held]
                self._context, self._new = (sure if piece else self._context), new[len(sure) :]
                return piece
        return ""

    def finish(self) -> str:
        """What waited for bytes that never came, as the tokenizer shows it."""
        piece = self._piece(len(self._new)) if self._new else ""
        self._context, self._new = self._new, []
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
