"""Compiles grammars for guided decoding, beside the step loop, and keeps the compiled ones.

The library is llguidance: its limits bound the time of every compilation and every mask, and it needs no other package.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from trtx.torch_engine.core.grammar_errors import readable
from trtx.torch_engine.core.grammar_matcher import GrammarProblem, TokenMatcher
from trtx.torch_engine.sampling_plan import Grammar, SamplingPlan

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CACHE_BYTES = 1 << 30
"""Limit of the compiled grammars that are kept; each counts by :func:`estimated_bytes`."""
COMPILER_THREADS = 4  # one slow grammar delays no other; compiling releases the interpreter's lock
_STACK_BYTES = 256 << 20
"""Address space of a compiler thread's stack: the compiler follows references and rules by recursion.

With the usual 8 MiB, a chain of 4,000 references ends the process. 512 KiB of text hold a chain of 18,000.
"""
MOST_MASK_THREADS = 8
SEQUENCES_PER_COPY = 4
"""Sequences of one compiled grammar share its states behind a lock, so that the threads that compute masks wait for
each other. So a grammar that many sequences follow is compiled several times, at most once for each such thread."""
MAX_COPIED_CHARACTERS = 16 << 10  # longer grammars take long to compile: there is one copy of each
MAX_STATES = 50_000  # of the patterns of one compiled grammar: about 20 MB
MAX_ITEMS_IN_ROW = 5_000  # an optional property takes four
STEP_FUEL = 50_000  # a mask whose patterns need more ends its sequence
WHITESPACE = r"[ \n\r\t]{1,32}"
"""Whitespace between the parts of JSON. Without a limit, a model may write whitespace until its tokens are used up."""


def estimated_bytes(text: str, num_sequences: int = 0) -> int:
    """Estimated memory of a compiled grammar that ``num_sequences`` have followed.

    Measured: 0.1 MB for small grammars, and 44 to 383 bytes for each character of large ones (20,000 enum values, 9,000
    properties, 1,000 structural tags). All sequences of a grammar share the states of its patterns. These grow by up to
    7 MB for a sequence of 400 tokens, and by 20 MB at most (``MAX_STATES``).
    """
    return (128 << 10) + 400 * len(text) + min(20 << 20, num_sequences << 20)


@dataclass(slots=True)
class _Cached:
    copies: list[Future[LLMatcher]]
    estimated_bytes: int
    num_sequences: int = 0


@dataclass(frozen=True, slots=True)
class GrammarCounts:
    """Counts of grammars: compiled or found in the cache since the start, and in the cache now."""

    compiled: int
    reused: int
    cached: int


class Grammars:
    """Compiles grammars in threads of its own, and hands out matchers. Called by the step loop's thread."""

    def __init__(
        self,
        tokenizer: LLTokenizer,
        *,
        vocab_size: int,
        on_compiled: Callable[[], None] = lambda: None,
        mask_threads: int | None = None,
    ) -> None:
        """``on_compiled``: called in a compiler thread after each compilation, to wake the step loop.

        ``mask_threads`` None: half of the cores, at most ``MOST_MASK_THREADS``.
        """
        from llguidance import LLExecutor

        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(tokenizer.eos_tokens)
        self._on_compiled = on_compiled
        self._cached: OrderedDict[tuple[str, str], _Cached] = OrderedDict()
        self._used_bytes = 0
        self._num_compiled = self._num_reused = 0
        self._threads = _threads(COMPILER_THREADS, "grammar-compiler")
        self._renewals = _threads(1, "grammar-renewal")  # the step loop waits for it
        self._most_copies = mask_threads or max(1, min(MOST_MASK_THREADS, (psutil.cpu_count() or 1) // 2))
        self.executor = LLExecutor(self._most_copies)

    def compile(self, grammar: Grammar) -> Future[LLMatcher]:
        """Starts to compile, or returns the compilation of an equal grammar. The future raises GrammarProblem."""
        key = (grammar.kind, grammar.text)
        known = self._cached.get(key)
        if known is None:
            known = self._cached[key] = _Cached([], 0)
            self._num_compiled += 1
        else:
            self._num_reused += 1
        most = self._most_copies if len(grammar.text) <= MAX_COPIED_CHARACTERS else 1
        if len(known.copies) < min(most, 1 + known.num_sequences // SEQUENCES_PER_COPY):
            copy = self._threads.submit(_compile, self._tokenizer, grammar)
            copy.add_done_callback(lambda _: self._on_compiled())
            known.copies.append(copy)
        self._cached.move_to_end(key)
        known.num_sequences += 1
        self._used_bytes -= known.estimated_bytes
        known.estimated_bytes = len(known.copies) * estimated_bytes(grammar.text, known.num_sequences)
        self._used_bytes += known.estimated_bytes
        while self._used_bytes > CACHE_BYTES and len(self._cached) > 1:
            _, oldest = self._cached.popitem(last=False)
            self._used_bytes -= oldest.estimated_bytes
        return known.copies[known.num_sequences % len(known.copies)]

    @property
    def counts(self) -> GrammarCounts:
        return GrammarCounts(self._num_compiled, self._num_reused, len(self._cached))

    def renewed(self, grammar: Grammar, exhausted: LLMatcher) -> LLMatcher:
        """Returns the grammar newly compiled, in place of the ``exhausted`` one. Waits, and raises GrammarProblem."""
        known = self._cached.get((grammar.kind, grammar.text))
        done = [] if known is None else [(at, copy) for at, copy in enumerate(known.copies) if copy.done()]
        at = next((at for at, copy in done if copy.result() is exhausted), None)
        if at is None and done:
            return done[0][1].result()  # another sequence has had it renewed
        compiled = self._renewals.submit(_compile, self._tokenizer, grammar)
        if known is not None and at is not None:
            known.copies[at] = compiled
        return compiled.result()

    def matcher(self, compiled: LLMatcher, plan: SamplingPlan) -> TokenMatcher:
        """Returns a new matcher at the beginning of a compiled grammar, for one sequence."""
        return TokenMatcher(compiled, plan, self._eos_ids, self._vocab_size)

    def close(self) -> None:
        for threads in (self._threads, self._renewals):
            threads.shutdown(wait=False, cancel_futures=True)


def _threads(count: int, name: str) -> ThreadPoolExecutor:
    """Starts threads with stacks of ``_STACK_BYTES``."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        threads = ThreadPoolExecutor(count, thread_name_prefix=name)
        all_run = threading.Barrier(count + 1)
        for _ in range(count):
            threads.submit(all_run.wait)
        all_run.wait()
    finally:
        threading.stack_size(before)
    return threads


def _compile(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    from llguidance import LLMatcher

    compiled = LLMatcher(tokenizer, _source(grammar), limits=_limits(), log_level=0)
    if not compiled.is_error():
        compiled.compute_bitmask()  # builds the automaton's first states here, not in a step
    if compiled.is_error() or compiled.is_stopped():
        problem = _problem(grammar, compiled.get_error())
        raise GrammarProblem(f"the {_TITLES[grammar.kind]} can't be followed: {problem}")
    return compiled


_TITLES = {
    "json": "JSON schema",
    "regex": "regular expression",
    "grammar": "grammar",
    "structural_tag": "structural tag",
}


def load_vocabulary(tokenizer: str | Path, *, vocab_size: int, eos_ids: tuple[int, ...]) -> LLTokenizer:
    """Reads the model's vocabulary for grammars from ``tokenizer``: the path or the text of a tokenizer.json.

    Tokens of the model beyond the tokenizer's vocabulary are never allowed. Raises ValueError for a tokenizer that the
    library can't use. It holds the interpreter's lock for about a second with 151,936 tokens.
    """
    from llguidance import LLTokenizer

    ends = [token for token in eos_ids if 0 <= token < vocab_size]
    return LLTokenizer(str(tokenizer), n_vocab=vocab_size, eos_token=ends or None)


def _limits() -> LLParserLimits:
    """Limits of one grammar: they bound the time of its compilation and of each mask, and its memory."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_lexer_states=MAX_STATES, max_items_in_row=MAX_ITEMS_IN_ROW, step_lexer_fuel=STEP_FUEL, verbose_errors=False
    )


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's form. Raises GrammarProblem if it can't be converted."""
    from llguidance import LLMatcher, grammar_from

    try:
        if grammar.kind == "json":
            return _json_source(grammar.text)
        if grammar.kind == "structural_tag":
            return LLMatcher.grammar_from_lark(structural_tags(grammar.text))
        return grammar_from(grammar.kind, grammar.text)
    except (ValueError, KeyError, TypeError, AssertionError, RecursionError) as error:
        said = str(error).removeprefix("Failed to convert the grammar from GBNF to Lark: ")
        raise GrammarProblem(f"the {_TITLES[grammar.kind]} can't be read: {readable(said)}") from error


def _json_source(schema: str) -> str:
    """A JSON schema in llguidance's form, with its options.

    Joins texts: parsing a large schema would hold the interpreter's lock, and so stop the step loop, for some
    milliseconds. The schema begins on a line of its own, so that the column in an error is that of the schema
    (:func:`_problem`).
    """
    members = schema.strip().removesuffix("}")
    comma = "" if members.rstrip().endswith("{") else ","
    options = json.dumps({"whitespace_pattern": WHITESPACE})
    return f'{{"grammars":[{{"json_schema":\n{members}{comma}"x-guidance":{options}}}}}]}}'


def _problem(grammar: Grammar, said: str) -> str:
    """llguidance's message, with line numbers of the client's schema instead of those of :func:`_json_source`."""
    if grammar.kind == "json":
        said = re.sub(r"\bat line (\d+)", lambda found: f"at line {int(found[1]) - 1}", said)
    return readable(said)


def structural_tags(text: str) -> str:
    """A Lark grammar of free text with structural tags, as xgrammar and Dynamo describe them.

    ``{"type": "structural_tag", "structures": [{"begin", "schema", "end"}, …], "triggers": [text, …]}``: after a
    trigger, one of the structures that begin with it must follow. Raises ValueError.
    """
    from llguidance import StructTag

    said = json.loads(text)
    structures, triggers = (_list(said, name) for name in ("structures", "triggers"))
    tags = []
    for at, structure in enumerate(structures):
        begin, end = (_text(structure, name, f"structures[{at}]") for name in ("begin", "end"))
        schema = structure.get("schema")
        if not isinstance(schema, (dict, str)):
            raise ValueError(f"structures[{at}].schema is {type(schema).__name__}; expected a JSON schema")
        trigger = next((one for one in triggers if one and isinstance(one, str) and begin.startswith(one)), None)
        if trigger is None:
            raise ValueError(f"structures[{at}].begin is {begin!r}; expected it to begin with one of the triggers")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    return StructTag.to_grammar(tags, assume_special=False)


def _list(said: Any, name: str) -> list[Any]:
    value = said.get(name) if isinstance(said, dict) else None
    if not isinstance(value, list) or not value:
        raise ValueError(f'"{name}" is missing or empty; expected an object with the lists "structures" and "triggers"')
    return value


def _text(structure: Any, name: str, place: str) -> str:
    value = structure.get(name) if isinstance(structure, dict) else None
    if not isinstance(value, str):
        raise ValueError(f"{place}.{name} is missing or no text; expected text")
    return value
