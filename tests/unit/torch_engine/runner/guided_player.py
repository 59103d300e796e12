"""A vocabulary of characters, grammars in it, and an engine that serves requests with and without them."""

from __future__ import annotations

import json
import random
import re
import threading
from typing import Any

from engine_player import Answer, Engine, Wish
from jsonschema import Draft202012Validator  # type: ignore[import-untyped, unused-ignore]
from runner_player import random_prompt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trtx.torch_engine.core.grammars import Grammars, load_vocabulary
from trtx.torch_engine.core.speculation.speculation import Speculation
from trtx.torch_engine.llmapi.guided_decoding import GuidedDecodingParams
from trtx.torch_engine.messages import Submit
from trtx.torch_engine.runner import TorchRunner

CHARACTERS = [chr(code) for code in range(32, 127)]
EOS = len(CHARACTERS)
GRAMMARS: list[dict[str, Any]] = [
    {"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}},
    {"json": {"type": "object", "properties": {"s": {"type": "string", "maxLength": 3}}, "required": ["s"]}},
    {"json": {"enum": ["red", "green", 3, None]}},
    {"regex": "[0-9]{2,5}(cat|dog)?"},
]
_KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1},
    {"temperature": 1.0, "frequency_penalty": 0.5, "logprobs": 2},
]


def character_vocabulary(vocab_size: int) -> Any:
    """One token for each printable ASCII character, then the end token; the model may have more."""
    ids = {("Ġ" if one == " " else one): at for at, one in enumerate(CHARACTERS)} | {"<eos>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return load_vocabulary(tokenizer.to_str(), vocab_size=vocab_size, eos_ids=(EOS,))


def text_of(tokens: list[int]) -> str:
    return "".join(CHARACTERS[token] for token in tokens if token < EOS)


def guided_workload(seed: int, count: int = 9, *, share: float = 0.7) -> list[Wish]:
    """Requests of which a ``share`` follows a grammar."""
    dice, wishes = random.Random(seed), []
    for index in range(count):
        guide = GuidedDecodingParams(**dice.choice(GRAMMARS)) if dice.random() < share else None
        params = _KINDS[dice.randrange(len(_KINDS))] | {
            "max_tokens": dice.choice([3, 12, 30]), "seed": dice.randrange(2**64), "end_id": EOS,
            "guided_decoding": guide,
        }  # fmt: skip
        wishes.append(Wish(dice.randint(0, 9), random_prompt(dice.randint(1, 30), index), params, None))
    return wishes


def follows_its_grammar(wish: Wish, answer: Answer) -> bool:
    """Whether an answer is whole, and not cut by ``max_tokens``. Fails the test for one that breaks its grammar."""
    guide = wish.params["guided_decoding"]
    if guide is None or answer.reason != "stop":
        return False
    text = text_of(answer.tokens)
    if guide.regex is not None:
        assert re.fullmatch(guide.regex, text), text
    else:
        Draft202012Validator(guide.json).validate(json.loads(text))
    return True


def num_whole(answers: dict[int, Answer], wishes: list[Wish]) -> int:
    """Returns the number of answers that are whole, all of which follow their grammars."""
    return sum(follows_its_grammar(wish, answers[index]) for index, wish in enumerate(wishes))


def served_guided(
    runner: TorchRunner,
    wishes: list[Wish],
    *,
    overlap: bool,
    step_tokens: int = 24,
    speculation: Speculation | None = None,
) -> dict[int, Answer]:
    compiled = threading.Event()
    grammars = Grammars(character_vocabulary(runner.vocab_size), vocab_size=runner.vocab_size, on_compiled=compiled.set)
    engine = Engine(runner, overlap=overlap, step_tokens=step_tokens, grammars=grammars, speculation=speculation)
    for step in range(5000):
        for index, wish in enumerate(wishes):
            if wish.arrives == step:
                engine.core.submit(Submit(index, wish.prompt, wish.plan))
        engine.step()
        if step > max(wish.arrives for wish in wishes) and engine.core.wait_s is None:
            if sum(answer.reason is not None for answer in engine.answers.values()) == len(wishes):
                break
            assert compiled.wait(60)
            compiled.clear()
    grammars.close()
    assert len(engine.answers) == len(wishes)
    return engine.answers
