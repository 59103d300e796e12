"""The tokenizer of ``synthetic:tiny-tools``: copying is easy with it, because text has the same tokens everywhere.

No token joins a space, a line break, a full stop or a quotation mark to letters, so "Paris" has the same tokens in a
question, in JSON, in a result and at the end of a sentence. A small model could not learn for every word that " Paris"
and "Paris" are the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from trtx.checkpoint.tokenizer import SPECIAL_TOKENS, TokenizerFiles, tokenizer_config

# As in Qwen3, these are tokens, but not special ones: the engine shows them, and the parsers read them as text.
MARKS = (
    "<think>", "</think>", "<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"
)  # fmt: skip
# A word with its first capital; a digit; a run of JSON's punctuation; any other character.
_PIECES = r"""\p{Lu}?\p{Ll}+|\p{L}|\p{N}|[{}\[\]":,]+|[\s\S]"""


def make_tool_tokenizer(vocab_size: int, context_length: int, corpus: Iterable[str], template: str) -> TokenizerFiles:
    """Trains the BPE. The result is determined by the arguments and the ``tokenizers`` release."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    marks = [AddedToken(mark, special=False, normalized=False) for mark in MARKS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *marks],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    state: dict[str, Any] = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] not in MARKS
    if (found := len(state["model"]["vocab"])) != vocab_size:
        raise ValueError(f"the corpus gives {found} tokens; expected {vocab_size}")
    added = {
        str(token["id"]): {name: value for name, value in token.items() if name != "id"}
        for token in state["added_tokens"]
    }
    return TokenizerFiles(state, tokenizer_config(context_length, added, template), (), template)
