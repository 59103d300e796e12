"""The tokenizer of the synthetic models: a byte-level BPE, trained here, with text for every id of the vocabulary.

A random model samples any id. If an id had no text, its chunk would be empty: the detokenizer would hold it back, and a
load generator that counts tokens by tokenizing the answer would count too few. The ids that the BPE does not use are
therefore whole made-up words (" bakodu"), and ``ignore_merges`` makes each of them encode back to its single id.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtx.checkpoint.text import sentences

PAD, BOS, END_OF_TEXT, IM_START, IM_END = SPECIAL_TOKENS = (
    "<|pad|>",
    "<|bos|>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
)
EOS_IDS = (SPECIAL_TOKENS.index(IM_END), SPECIAL_TOKENS.index(END_OF_TEXT))
BASE_VOCABULARY = 2048  # the special tokens, 256 bytes and merges of a tokenizer; made-up words fill the rest

_BEFORE_CONTENT = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
)
_PARTS = "{% else %}{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
_AFTER_PARTS = "{% endif %}{% endfor %}"
_AFTER_CONTENT = (
    "{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHAT_TEMPLATE = _BEFORE_CONTENT + _AFTER_CONTENT
"""Of text models: takes strings alone, so that Dynamo renders it as transformers does (``trtx.prompts.same``)."""


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """The special tokens of a multimodal model, and the text that its chat template writes for an image part."""

    tokens: tuple[str, ...]
    picture: str
    video: str = ""  # "": the template writes nothing for a video
    is_numbered: bool = False  # the template writes each image's number in the conversation (1, 2, 3) before the image

    @property
    def chat_template(self) -> str:
        """The template, which writes one placeholder for each image or video, in the order of the parts."""
        begin, number = "", ""
        if self.is_numbered:
            begin = "{% set seen = namespace(pictures=0) %}"
            number = "{% set seen.pictures = seen.pictures + 1 %}{{ seen.pictures }}"
        media = f"{{% elif part['type'] == 'image' %}}{number}{self.picture}"
        if self.video:
            media += f"{{% elif part['type'] == 'video' %}}{self.video}"
        return begin + _BEFORE_CONTENT + _PARTS + media + _AFTER_PARTS + _AFTER_CONTENT

    def id_of(self, token: str) -> int:
        return len(SPECIAL_TOKENS) + self.tokens.index(token)


LLAVA_TOKENS = MediaTokens(tokens=("<image>",), picture="<image>")
NUMBERED_TOKENS = replace(LLAVA_TOKENS, is_numbered=True)  # a small model needs the numbers to distinguish images
QWEN_TOKENS = MediaTokens(
    tokens=("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    picture="<|vision_start|><|image_pad|><|vision_end|>",
    video="<|vision_start|><|video_pad|><|vision_end|>",
)

# Qwen2's pre-tokenization: words with one preceding character, single digits, runs of punctuation, runs of whitespace.
# AutoTokenizer of transformers 5 (seen in 5.23) rebuilds the tokenizer of a qwen2 model with this pattern and ignores
# the one in tokenizer.json; with the same pattern in both, they agree on prompts. It also drops ignore_merges, so only
# there a made-up word encodes to several ids.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPACE = "\u0120"  # byte-level BPE's symbol for a space
_SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprstvwz" for vowel in "aeiou")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The contents of the three files, and the ids of special tokens, bytes and fragments, whose text is no word."""

    tokenizer: dict[str, Any]
    config: dict[str, Any]
    fragment_ids: tuple[int, ...]
    chat_template: str = CHAT_TEMPLATE

    def write(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_text(json.dumps(self.tokenizer, ensure_ascii=False), encoding="utf-8")
        (directory / "tokenizer_config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
        (directory / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")


def make_tokenizer(
    vocab_size: int, context_length: int, corpus: Iterable[str] | None = None, media: MediaTokens | None = None
) -> TokenizerFiles:
    """Trains the BPE up to ``BASE_VOCABULARY`` ids, and fills the rest up to ``vocab_size`` with made-up words.

    ``corpus``: the training text; default: generated text. ``media``: the special tokens of a multimodal model. The
    result is determined by the arguments and the ``tokenizers`` release.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    special = SPECIAL_TOKENS + (media.tokens if media is not None else ())
    template = media.chat_template if media is not None else CHAT_TEMPLATE
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(BASE_VOCABULARY, vocab_size),
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus or sentences(seed=0, count=12000), trainer)

    state: dict[str, Any] = json.loads(tokenizer.to_str())
    vocabulary: dict[str, int] = state["model"]["vocab"]
    fragments = tuple(id_ for token, id_ in vocabulary.items() if not _is_word(token))
    index = 0
    while len(vocabulary) < vocab_size:
        word = _made_up_word(index)
        index += 1
        if word not in vocabulary:
            vocabulary[word] = len(vocabulary)
    whole = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    added = {str(id_): {"content": token, **whole} for id_, token in enumerate(special)}
    config = tokenizer_config(context_length, added, template)
    return TokenizerFiles(state, config, tuple(sorted(fragments)), template)


def _is_word(token: str) -> bool:
    return token.startswith(_SPACE) and len(token) > 2 and token[1:].isascii() and token[1:].isalpha()


def _made_up_word(index: int) -> str:
    """Returns word ``index`` of 421,875 distinct words of three syllables.

    The step between successive words and the number of words are coprime, so no word occurs twice.
    """
    index = index * 152_447 % len(_SYLLABLES) ** 3
    first, rest = divmod(index, len(_SYLLABLES) ** 2)
    second, third = divmod(rest, len(_SYLLABLES))
    return _SPACE + _SYLLABLES[first] + _SYLLABLES[second] + _SYLLABLES[third]


def tokenizer_config(context_length: int, added: dict[str, dict[str, Any]], template: str) -> dict[str, Any]:
    """The content of ``tokenizer_config.json``. ``added``: the added tokens by id, in decimal."""
    return {
        "added_tokens_decoder": added,
        "bos_token": BOS,
        "eos_token": IM_END,
        "pad_token": PAD,
        "add_bos_token": False,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
