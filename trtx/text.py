"""Between tokens and text: tokenizers, and incremental detokenization."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from trtx.errors import UsageError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CHARACTER_BYTES = 4
"""Longest UTF-8 encoding of a character, and so the largest number of tokens that one can span."""
_LONGEST_WAIT = 16
"""Largest number of tokens held back for the rest of a character. If more are waiting, the earlier ones are not valid
UTF-8, and are shown as replacement characters."""


class Tokenizer(Protocol):
    """The part of ``tokenizers.Tokenizer`` that the engine uses."""

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Any: ...

    def encode_batch_fast(self, input: Sequence[str], *, add_special_tokens: bool = True) -> Any: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Loads a checkpoint's fast tokenizer so that it encodes as transformers does.

    ``encode(text)`` adds the begin-of-text token if the checkpoint defines one. Padding and truncation that a training
    run left in ``tokenizer.json`` are turned off. Every part of trtx that encodes text with a checkpoint's tokenizer
    loads it here. transformers takes seconds to import, so it is used only if it may encode differently from
    ``tokenizer.json`` (:func:`is_encoded_by_file`). Raises UsageError, naming the file, if the tokenizer can't be read.
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
    """Loads the tokenizer from ``tokenizer.json``, without padding and truncation. Never imports transformers.

    Use it to decode tokens; use :func:`load_tokenizer` to encode text. Raises UsageError, naming the file, if it can't
    be read.
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
    """Whether transformers encodes text exactly as ``tokenizer.json`` defines.

    transformers 5 rebuilds the tokenizers of many model families from the vocabulary and its own code. It uses the file
    unchanged if ``tokenizer_config.json`` names the generic class. Even then, ``add_bos_token`` and ``add_eos_token``
    change which tokens it adds, and it adds the tokens of ``added_tokens_decoder`` to those in the file.
    """
    try:
        config = json.loads((model_dir / "tokenizer_config.json").read_bytes())
        if config.get("tokenizer_class") not in _FILE_CLASSES or config.get("auto_map"):
            return False
        if config.get("add_bos_token") or config.get("add_eos_token"):
            return False
        in_file = {str(token["id"]): token for token in _tokenizer_head(model_dir)["added_tokens"]}
        named = config.get("added_tokens_decoder") or {}
        return all(_is_same_token(token, in_file.get(str(id_))) for id_, token in named.items())
    except (OSError, ValueError, AttributeError, LookupError, TypeError):
        return False


def pads_or_truncates(model_dir: Path) -> bool:
    """Whether ``tokenizer.json`` defines padding or truncation, which training runs may leave there."""
    head = _tokenizer_head(model_dir)
    return bool(head["padding"] or head["truncation"])


def _tokenizer_head(model_dir: Path) -> Mapping[str, Any]:
    """The fields of ``tokenizer.json`` that are no part of its model, whose parsing takes most of the time."""
    path = model_dir / "tokenizer.json"
    stat = path.stat()
    return _parsed_head(path, stat.st_ino, stat.st_size, stat.st_ctime_ns)


@lru_cache(maxsize=8)
def _parsed_head(path: Path, inode: int, size: int, changed_ns: int) -> Mapping[str, Any]:
    """Parses ``path``. The other arguments make the cache distinguish files that were written to the same path."""
    state = json.loads(path.read_bytes())
    return {
        "added_tokens": state.get("added_tokens", ()),
        "padding": state.get("padding"),
        "truncation": state.get("truncation"),
    }


@contextlib.contextmanager
def torch_hidden() -> Iterator[None]:
    """Hides torch while transformers is imported; transformers then treats torch as absent in the whole process.

    transformers imports torch if it is installed, which takes 2 s of CPU time that a tokenizer does not need (seen with
    5.23).
    """
    sys.modules["torch"] = None  # type: ignore[assignment]  # None makes an import fail
    try:
        yield
    finally:
        del sys.modules["torch"]


def load_hf_tokenizer(model_dir: Path, *, trust_remote_code: bool = False) -> Any:
    """Loads a checkpoint's tokenizer with transformers.

    Raises UsageError, naming the directory, if that fails or the tokenizer is empty: for some families (Qwen2, seen
    with 5.23), transformers creates a tokenizer without a vocabulary if the directory has no vocabulary file.
    """
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(model_dir), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        # transformers appends several lines of advice, whatever the cause
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
    """The ``tokenizers.Tokenizer`` inside a transformers tokenizer, without padding and truncation.

    Raises ValueError for a slow tokenizer, which has none.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(tokenizer).__name__} is a slow tokenizer, expected one with a tokenizer.json")
    return _whole(backend)


@dataclass(frozen=True, slots=True)
class ByteTokens:
    """The byte tokens of a tokenizer with byte fallback, such as ``<0xE4>``.

    ``values`` maps token ids to bytes. ``skipped`` holds the special tokens: if they are left out of the text, they
    don't separate the byte tokens around them.
    """

    values: Mapping[int, int]
    skipped: frozenset[int]


def byte_tokens(tokenizer: Any) -> ByteTokens | None:
    """The byte tokens that a decoder such as Llama 2's, Mistral's or Gemma's joins into characters.

    None for a decoder without byte fallback. The result is cached, because it is needed for every answer.
    """
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
    """Number of leading bytes of ``data`` that form whole characters; all of them if the rest is not UTF-8."""
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
    """Detokenizes incrementally. Incomplete characters are held back until their last byte arrives.

    Each piece is decoded together with the tokens before it, so that the joined pieces equal the decoded whole,
    including spaces and multi-byte characters.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._bytes = byte_tokens(tokenizer)
        self._context: list[int] = []  # tokens of the last piece
        self._new: list[int] = []  # tokens whose text has not been returned

    def feed(self, token_ids: Sequence[int]) -> str:
        """Returns the text that later tokens can no longer change; it may be empty."""
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
        """:meth:`feed` for a tokenizer with byte tokens.

        If a run of byte tokens is not valid UTF-8 as a whole, the decoder shows one replacement character for each of
        them. So a run is held back until it ends.
        """
        new = self._new
        start = count = self._run_start(byte_tokens)
        if len(new) - start > _LONGEST_WAIT:  # return whole characters of a long run
            run = [(at, byte_tokens.values[new[at]]) for at in range(start, len(new)) if new[at] in byte_tokens.values]
            whole = _whole_characters(bytes(value for _, value in run))
            count = run[whole][0] if whole < len(run) else len(new)
        if not count:
            return ""
        piece = self._piece(count)
        # A run that continues is decoded from here: together with its beginning it could be invalid UTF-8 as a whole.
        self._context, self._new = new[:start] or self._context, new[count:]
        return piece

    def _run_start(self, byte_tokens: ByteTokens) -> int:
        """Index in ``_new`` at which its trailing run of byte tokens begins."""
        skipped = byte_tokens.skipped if self._skip_special_tokens else frozenset()
        start = len(self._new)
        while start and (self._new[start - 1] in byte_tokens.values or self._new[start - 1] in skipped):
            start -= 1
        return start

    def finish(self) -> str:
        """Returns the text of the tokens held back, as the tokenizer shows incomplete characters."""
        piece = self._piece(len(self._new)) if self._new else ""
        context = self._new if self._bytes is None else self._new[: self._run_start(self._bytes)]
        self._context, self._new = context or self._context, []
        return piece

    def _piece(self, count: int) -> str:
        """The text of the first ``count`` new tokens."""
        decode, skip = self._tokenizer.decode, self._skip_special_tokens
        return decode(self._context + self._new[:count], skip)[len(decode(self._context, skip)) :]
