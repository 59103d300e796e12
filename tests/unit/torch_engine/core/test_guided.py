"""Guided decoding in the engine core: an oracle that takes any allowed token, and what the grammars make of it."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.unit.torch_engine.core.hostile_grammars import HOSTILE, value_of
from tests.unit.torch_engine.core.oracle_runner import VOCAB, OracleRunner, OracleTransport, Wire, undisturbed
from tests.unit.torch_engine.core.test_disaggregation import _generation
from tests.unit.torch_engine.core.test_engine_core import Harness, prompt_of
from trtx.torch_engine.core import grammars as compiler
from trtx.torch_engine.core.grammar_matcher import write_masks
from trtx.torch_engine.core.grammars import Grammars, load_vocabulary
from trtx.torch_engine.llmapi.guided_decoding import GuidedDecodingParams
from trtx.torch_engine.messages import Handoff
from trtx.torch_engine.sampling_plan import SamplingPlan

CHARACTERS = [chr(code) for code in range(32, 127)]
THINK_END, EOS = 95, 96  # behind the characters; VOCAB is 97
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}}, "required": ["a"],
     "additionalProperties": False},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
    {"enum": ["red", "green", 3, None]},
    {"type": "object", "properties": {"s": {"type": "string", "maxLength": 3}, "b": {"type": "boolean"}},
     "required": ["b"], "additionalProperties": False},
    {"anyOf": [{"type": "string", "pattern": "^[a-c]{1,4}$"}, {"const": [1, 2]}]},
]  # fmt: skip
REGEX = "[0-9]{2,5}(cat|dog)?"


@pytest.fixture(scope="module")
def vocabulary() -> Any:
    ids = {("Ġ" if one == " " else one): at for at, one in enumerate(CHARACTERS)} | {"<end>": THINK_END, "<eos>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<eos>"])
    return load_vocabulary(tokenizer.to_str(), vocab_size=VOCAB, eos_ids=(EOS,))


class Guided(Harness):
    """A harness whose requests may have grammars. It waits for the compiler where the engine would sleep."""

    def __init__(self, vocabulary: Any, **options: Any) -> None:
        self.compiled = threading.Event()
        self.grammars = Grammars(vocabulary, vocab_size=VOCAB, on_compiled=self.compiled.set, mask_threads=1)
        super().__init__(grammars=self.grammars, **options)
        self.asked: set[int] = set()

    def ask(self, at: int, prompt: list[int], max_tokens: int, grammar: dict[str, Any] | None, **sampling: Any) -> None:
        self.asked.add(at)
        params = None if grammar is None else GuidedDecodingParams(**grammar)
        sampling = {"end_id": EOS, "guided_decoding": params} | sampling
        self.submit(at, prompt, max_tokens, sampling=sampling)

    def finish(self) -> None:
        for _ in range(5000):
            if self.asked <= self.finished.keys() | self.errors.keys():
                break
            self.step()
            if self.core.wait_s is None and not self.asked <= self.finished.keys() | self.errors.keys():
                assert self.compiled.wait(60)
                self.compiled.clear()
        self.run()
        assert self.asked == self.finished.keys() | self.errors.keys()
        assert self.is_empty()

    def text(self, at: int) -> str:
        return "".join(CHARACTERS[token] for token in self.tokens[at] if token < len(CHARACTERS))


@pytest.fixture
def engine(vocabulary: Any) -> Iterator[Callable[..., Guided]]:
    made: list[Guided] = []

    def make(**options: Any) -> Guided:
        made.append(Guided(vocabulary, **options))
        return made[-1]

    yield make
    for one in made:
        one.core.close()


def fits(grammar: dict[str, Any], text: str) -> bool:
    if "regex" in grammar:
        return re.fullmatch(grammar["regex"], text) is not None
    return Draft202012Validator(grammar["json"]).is_valid(json.loads(text))


GRAMMARS: list[dict[str, Any]] = [*({"json": schema} for schema in SCHEMAS), {"regex": REGEX}]


def workload(seed: int) -> list[dict[str, Any]]:
    dice = random.Random(seed)
    wishes = []
    for at in range(dice.randint(2, 9)):
        grammar = dice.choice([None, *GRAMMARS, *GRAMMARS])
        length = dice.randint(1, 22)
        prompt = prompt_of(30, dice.randint(0, 2))[:length] if dice.random() < 0.5 else prompt_of(length, at)
        wishes.append(
            {
                "arrives": dice.randint(0, 12), "prompt": prompt, "grammar": grammar,
                "max_tokens": dice.choice([1, 2, 5, 12, 30]),
                "aborts": dice.choice([None, None, None, dice.randint(0, 15)]),
            }
        )  # fmt: skip
    return wishes


def play(engine: Guided, wishes: list[dict[str, Any]]) -> Guided:
    for step in range(30):
        for at, wish in enumerate(wishes):
            if wish["arrives"] == step:
                engine.ask(at, wish["prompt"], wish["max_tokens"], wish["grammar"])
            if wish["aborts"] is not None and wish["arrives"] + wish["aborts"] == step:
                engine.core.abort([at])
        engine.step()
    engine.finish()
    return engine


@given(
    seed=st.integers(0, 10**9), overlap=st.booleans(), chunked=st.booleans(), reuse=st.booleans(),
    num_blocks=st.integers(13, 24), batch=st.integers(1, 5),
)  # fmt: skip
@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
def test_what_stops_fits_its_grammar_whatever_else_happens(
    vocabulary: Any, seed: int, overlap: bool, chunked: bool, reuse: bool, num_blocks: int, batch: int
) -> None:
    wishes = workload(seed)
    options = {"num_blocks": num_blocks, "batch": batch, "tokens": 24 if not chunked else 7, "chunked": chunked}
    found = play(Guided(vocabulary, overlap=overlap, enable_block_reuse=reuse, **options), wishes)
    assert not found.errors
    for at, wish in enumerate(wishes):
        grammar, reason = wish["grammar"], found.finished[at]
        assert reason == "cancelled" if reason not in ("stop", "length") else True
        if reason == "cancelled":
            assert wish["aborts"] is not None
            continue
        alone = Guided(vocabulary)
        alone.ask(at, wish["prompt"], wish["max_tokens"], grammar)
        alone.finish()
        assert (alone.tokens[at], alone.finished[at]) == (found.tokens[at], reason)
        alone.core.close()
        if grammar is not None and reason == "stop":
            assert fits(grammar, found.text(at)), found.text(at)
        if reason == "length":
            assert len(found.tokens[at]) == wish["max_tokens"]
    found.core.close()


def test_small_pools_preempt_guided_sequences_which_resume_with_the_same_tokens(
    engine: Callable[..., Guided],
) -> None:
    numbers = {"json": {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "minItems": 9}}
    small, large = (engine(num_blocks=blocks, batch=4, tokens=64, enable_iter_perf_stats=True) for blocks in (10, 99))
    for one in (small, large):
        for at in range(4):
            one.ask(at, prompt_of(8, at), 20, numbers)
        one.finish()
    assert any(row["inflightBatchingStats"]["numPausedRequests"] for row in small.stats), "nothing was preempted"
    assert small.tokens == large.tokens and small.finished == large.finished


def test_unguided_sequences_have_the_tokens_that_they_have_alone(engine: Callable[..., Guided]) -> None:
    h = engine()
    for at in range(6):
        h.ask(
            at,
            prompt_of(5, at),
            12,
            {"json": SCHEMAS[at % 5]} if at % 2 else None,
            **({} if at % 2 else {"end_id": -1}),
        )
    h.finish()
    for at in (0, 2, 4):
        assert h.tokens[at] == undisturbed(prompt_of(5, at), 12)


def test_a_request_waits_for_its_own_grammar_only(
    engine: Callable[..., Guided], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the reason why no step waits: the step loop goes on while the compiler is held up."""
    may_compile, compile_ = threading.Event(), compiler._compile

    def held_up(*given: Any) -> Any:
        assert may_compile.wait(60)
        return compile_(*given)

    monkeypatch.setattr(compiler, "_compile", held_up)
    h = engine()
    h.ask(1, prompt_of(4), 20, {"regex": REGEX})
    h.ask(2, prompt_of(4, 1), 20, None, end_id=-1)
    h.ask(3, prompt_of(4, 2), 20, {"regex": "x+"})
    h.run()
    assert h.tokens[2] == undisturbed(prompt_of(4, 1), 20) and not h.tokens[1]
    h.core.abort([3])
    may_compile.set()
    h.finish()
    assert h.finished == {1: "stop", 2: "length", 3: "cancelled"} and not h.tokens[3]


def test_a_grammar_that_fails_ends_its_own_request_with_the_reason(engine: Callable[..., Guided]) -> None:
    h = engine()
    h.ask(1, prompt_of(4), 20, {"regex": "(?=a)b"})
    h.ask(2, prompt_of(4), 20, {"json": {"type": "object", "properties": {"a": False}, "required": ["a"]}})
    h.ask(3, prompt_of(4), 20, {"regex": REGEX})
    h.finish()
    assert h.errors == {
        1: "the regular expression can't be followed: the pattern '(?=a)b' is not accepted: look-around, including "
        "look-ahead and look-behind, is not supported",
        2: "the JSON schema can't be followed: no value can satisfy it: required property 'a' is unsatisfiable",
    }
    assert h.finished == {3: "stop"}


def test_thinking_is_free_until_its_end_and_the_grammar_holds_afterwards(engine: Callable[..., Guided]) -> None:
    h = engine(num_blocks=500)
    for at in range(6):
        h.ask(at, prompt_of(6, at), 900, {"regex": REGEX, "thinking_end_id": THINK_END})
    h.finish()
    ended = 0
    for at in range(6):
        tokens = h.tokens[at]
        assert THINK_END in tokens or h.finished[at] == "length"
        if h.finished[at] == "stop":
            ended += 1
            text = "".join(CHARACTERS[token] for token in tokens[tokens.index(THINK_END) + 1 :] if token < 95)
            assert fits({"regex": REGEX}, text)
            assert EOS not in tokens[:-1]
    assert ended


@pytest.mark.parametrize("ignores_end", [True, False])
def test_a_complete_text_ends_also_without_an_end_token(engine: Callable[..., Guided], ignores_end: bool) -> None:
    h = engine()
    h.ask(1, prompt_of(6), 30, {"regex": "abc"}, **({"ignore_eos": True} if ignores_end else {}))
    h.finish()
    assert (h.text(1), h.finished) == ("abc", {1: "stop"})


@pytest.mark.parametrize("ignores_end", [True, False])
def test_min_tokens_beyond_a_complete_text_is_an_error_that_says_so(
    engine: Callable[..., Guided], ignores_end: bool
) -> None:
    h = engine()
    h.ask(1, prompt_of(6), 30, {"regex": "abc"}, min_tokens=9, ignore_eos=ignores_end)
    h.ask(2, prompt_of(6), 30, {"regex": "a{9,}"}, min_tokens=9)
    h.finish()
    assert re.search("complete after 3 tokens, and min_tokens is 9; lower", h.errors[1])
    assert len(h.tokens[2]) >= 9 and h.errors.keys() == {1}


def test_a_stop_token_ends_a_sequence_where_its_text_may_end_and_nowhere_else(engine: Callable[..., Guided]) -> None:
    stop = CHARACTERS.index("~")
    h = engine()
    for at in range(8):
        h.ask(at, prompt_of(6, at), 40, {"regex": "[a-z]{3}[0-9~]*"}, stop_token_ids=[stop], ignore_eos=True)
    h.finish()
    assert set(h.finished.values()) == {"stop"}
    assert all(re.fullmatch("[a-z]{3}[0-9]*", h.text(at)) for at in range(8))


def test_a_failure_of_the_model_is_no_fault_of_the_grammar(engine: Callable[..., Guided]) -> None:
    h = engine(bad_token=CHARACTERS.index("a"))
    h.ask(1, prompt_of(6), 30, {"regex": "abc"})
    h.finish()
    assert h.errors == {1: "no number"} and h.updates[-1].is_failure


def test_a_grammar_whose_states_are_used_up_by_others_is_compiled_again(
    engine: Callable[..., Guided], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sequences of a compiled grammar share the states of its patterns: without that, each later one would fail."""
    monkeypatch.setattr(compiler, "MAX_STATES", 600)
    grammar = {"regex": "[ab]*a[ab]{12}b[ab]*"}
    h, expected = engine(num_blocks=200, batch=4), engine(num_blocks=200, batch=4)
    sources = set()
    for at in range(40):
        h.ask(at, prompt_of(6, at), 40, grammar)
    while not h.finished.keys() >= set(range(40)) and not h.errors:
        h.step()
        sources |= {id(one.matcher.source) for one in h.core.scheduler.running if one.matcher is not None}
    assert len(sources) > 1, "the states were never used up"
    assert not h.errors
    monkeypatch.setattr(compiler, "MAX_STATES", 250_000)
    for at in range(40):
        expected.ask(at, prompt_of(6, at), 40, grammar)
    expected.finish()
    assert (h.tokens, h.finished) == (expected.tokens, expected.finished)


def test_the_decode_side_goes_on_in_the_grammar_where_prefill_stopped(engine: Callable[..., Guided]) -> None:
    whole, decode = engine(), engine()
    for at, grammar in enumerate(GRAMMARS):
        whole.ask(at, prompt_of(9, at), 30, grammar)
    whole.finish()
    for at, grammar in enumerate(GRAMMARS):
        decode.asked.add(at)
        first = Handoff("generation_only", whole.tokens[at][:1], None, at, 7, None)
        params = GuidedDecodingParams(**grammar)
        decode.submit(at, prompt_of(9, at), 30, handoff=first, sampling={"end_id": EOS, "guided_decoding": params})
    decode.finish()
    assert (decode.tokens, decode.finished) == (whole.tokens, whole.finished)
    decode.asked.add(99)
    other = _generation(Handoff("context_only", [CHARACTERS.index("z")], None, 1, 7, None))
    params = GuidedDecodingParams(regex=REGEX)
    decode.submit(99, prompt_of(9), 30, handoff=other, sampling={"end_id": EOS, "guided_decoding": params})
    decode.finish()
    assert decode.errors[99].startswith(f"token {CHARACTERS.index('z')} does not follow the grammar")


def test_a_prefill_side_refuses_a_text_of_one_token_that_is_shorter_than_min_tokens(
    engine: Callable[..., Guided],
) -> None:
    """Decode never sees such a request, because its text is complete."""
    h = engine(transport=OracleTransport(Wire(), "prefill", OracleRunner(4)))
    sampling = {"guided_decoding": GuidedDecodingParams(regex="a"), "end_id": EOS}
    for at, least in ((1, 3), (2, 1)):
        h.asked.add(at)
        handoff = Handoff("context_only", disagg_request_id=7)
        h.submit(at, prompt_of(6, at), 9, handoff=handoff, sampling=sampling | {"min_tokens": least})
    for _ in range(200):
        h.step()
        if h.asked <= h.finished.keys() | h.errors.keys():
            break
        if h.core.wait_s is None:
            assert h.compiled.wait(60)
            h.compiled.clear()
    assert "complete after 1 tokens, and min_tokens is 3; lower" in h.errors[1]
    assert h.tokens[2] == [CHARACTERS.index("a")] and not h.errors.get(2)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_ends_in_one_sentence_or_is_followed(engine: Callable[..., Guided], name: str) -> None:
    """A few tokens are enough: what compiles must bear its masks, whose failure is a sentence too."""
    field, _, says = HOSTILE[name]
    h = engine(num_blocks=200)
    try:
        h.ask(1, prompt_of(5), 20, {field: value_of(name)})
        h.ask(2, prompt_of(5), 20, None, end_id=-1)
        h.finish()
        said = h.errors.get(1, "")
        assert h.tokens[2] == undisturbed(prompt_of(5), 20)
    except ValueError as error:
        said = str(error)
    assert re.search(says, said) if says else not said
    assert len(said) < 700 and "\n" not in said


def test_guided_decoding_that_is_off_refuses_a_grammar_with_the_way_to_turn_it_on() -> None:
    h = Harness()
    h.submit(1, prompt_of(4), 8, sampling={"guided_decoding": GuidedDecodingParams(regex="a")})
    h.step()
    assert "guided decoding, which is off; set guided_decoding_backend to llguidance" in h.errors[1]


def test_many_sequences_of_a_grammar_share_several_compiled_copies(vocabulary: Any) -> None:
    """The threads that compute masks would otherwise wait for each other: a copy's states are behind a lock."""
    grammars = Grammars(vocabulary, vocab_size=VOCAB, mask_threads=3)
    grammar = GuidedDecodingParams(regex="[ab]{8}").resolved()
    matchers = [
        grammars.matcher(grammars.compile(grammar).result(60), SamplingPlan(grammar=grammar)) for _ in range(40)
    ]
    assert len({id(matcher.source) for matcher in matchers}) == 3
    masks = np.zeros((len(matchers), -(-VOCAB // 32)), dtype=np.int32)
    write_masks(grammars.executor, dict(enumerate(matchers)), masks)
    assert (masks == masks[0]).all() and masks[0].any()
    grammars.close()
