"""Compiles grammars for guided decoding, beside the step loop, and keeps the compiled ones.

The library is llguidance. At a vocabulary of 151,936 tokens, it compiles a schema in 1 ms, where xgrammar 0.2.8 takes
63 ms, and its limits bound the time of every compilation and every mask.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from trtx.torch_engine.core.matcher import SHOWN_CHARACTERS, GrammarProblem, TokenMatcher
from trtx.torch_engine.sampling_plan import Grammar, SamplingPlan

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CACHE_BYTES = 256 << 20
"""Limit of the compiled grammars that are kept; each counts by :func:`estimated_bytes`."""
COMPILER_THREADS = 4  # one slow grammar delays no other; compiling releases the interpreter's lock
MOST_MASK_THREADS = 8
WHITESPACE = r"[ \n\r\t]{1,32}"
"""Whitespace between the parts of JSON. Without a limit, a model may write whitespace until its tokens are used up."""


def estimated_bytes(text: str) -> int:
    """Estimated memory of a compiled grammar: 256 KiB, and 64 bytes for each character of its text."""
    return (256 << 10) + 64 * len(text)


class Grammars:
    """Compiles each grammar once, in threads of its own, and hands out matchers. Called by the step loop's thread."""

    def __init__(
        self,
        tokenizer: LLTokenizer,
        *,
        vocab_size: int,
        on_compiled: Callable[[], None] = lambda: None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """``on_compiled``: called in a compiler thread after each compilation, to wake the step loop."""
        from llguidance import LLExecutor

        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(tokenizer.eos_tokens)
        self._on_compiled = on_compiled
        self._cache_bytes = cache_bytes
        self._cached: OrderedDict[tuple[str, str], Future[LLMatcher]] = OrderedDict()
        self._used_bytes = 0
        self._threads = ThreadPoolExecutor(COMPILER_THREADS, thread_name_prefix="grammar-compiler")
        cores = psutil.cpu_count() or 1
        self.executor = LLExecutor(max(1, min(MOST_MASK_THREADS, cores // 2)))

    def compile(self, grammar: Grammar) -> Future[LLMatcher]:
        """Starts to compile, or returns the compilation of an equal grammar. The future raises GrammarProblem."""
        key = (grammar.kind, grammar.text)
        if (known := self._cached.get(key)) is not None:
            self._cached.move_to_end(key)
            return known
        compiled = self._threads.submit(self._compile, grammar)
        self._cached[key] = compiled
        self._used_bytes += estimated_bytes(grammar.text)
        while self._used_bytes > self._cache_bytes and len(self._cached) > 1:
            oldest, _ = self._cached.popitem(last=False)
            self._used_bytes -= estimated_bytes(oldest[1])
        compiled.add_done_callback(lambda _: self._on_compiled())
        return compiled

    def matcher(self, compiled: LLMatcher, plan: SamplingPlan) -> TokenMatcher:
        """A matcher at the beginning of a compiled grammar, for a sequence of its own."""
        return TokenMatcher(compiled.deep_copy(), plan, self._eos_ids, self._vocab_size)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher

        compiled = LLMatcher(self._tokenizer, _source(grammar), limits=_limits())
        if not compiled.is_error():
            compiled.compute_bitmask()  # builds the automaton's first states here, not in a step
        if compiled.is_error() or compiled.is_stopped():
            said = compiled.get_error().split("\n", 1)[0] or "it permits no text"
            raise GrammarProblem(f"the {_TITLES[grammar.kind]} can't be followed: {said[:SHOWN_CHARACTERS]}")
        return compiled

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


_TITLES = {
    "json": "JSON schema",
    "regex": "regular expression",
    "grammar": "grammar",
    "structural_tag": "structural tag",
}


def load_vocabulary(tokenizer: str | Path, *, vocab_size: int, eos_ids: tuple[int, ...]) -> LLTokenizer:
    """Reads the model's vocabulary for grammars from ``tokenizer``: the path or the text of a tokenizer.json.

    Tokens of the model beyond the tokenizer's vocabulary are never allowed. Raises ValueError for a tokenizer that the
    library can't use. It holds the interpreter's lock, for about a second at 151,936 tokens.
    """
    from llguidance import LLTokenizer

    ends = [token for token in eos_ids if 0 <= token < vocab_size]
    return LLTokenizer(str(tokenizer), n_vocab=vocab_size, eos_token=ends or None)


def _limits() -> LLParserLimits:
    """Limits of one grammar. The library's own, with less memory for the states of a regular expression."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's form. Raises GrammarProblem if it can't be converted."""
    from llguidance import LLMatcher, grammar_from

    try:
        if grammar.kind == "json":
            return LLMatcher.grammar_from_json_schema(grammar.text, defaults={"whitespace_pattern": WHITESPACE})
        if grammar.kind == "structural_tag":
            return LLMatcher.grammar_from_lark(structural_tags(grammar.text))
        return grammar_from(grammar.kind, grammar.text)
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        said = str(error).split("\n", 1)[0][:SHOWN_CHARACTERS]
        raise GrammarProblem(f"the {_TITLES[grammar.kind]} can't be read: {said}") from error


def structural_tags(text: str) -> str:
    """A Lark grammar of free text with structural tags, as xgrammar and Dynamo describe them.

    ``{"type": "structural_tag", "structures": [{"begin", "schema", "end"}, …], "triggers": [text, …]}``: after a
    trigger, one of the structures that begin with it must follow.
    """
    from llguidance import StructTag

    said = json.loads(text)
    triggers: list[str] = said["triggers"]
    tags = []
    for structure in said["structures"]:
        begin = structure["begin"]
        trigger = next((one for one in triggers if begin.startswith(one)), None)
        if trigger is None:
            raise ValueError(f"no trigger begins the structure {begin!r}; expected one of {triggers!r}")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=structure["schema"], end=structure["end"]))
    return StructTag.to_grammar(tags, assume_special=False)
