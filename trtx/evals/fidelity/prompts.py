"""Prompts for the reference to continue: generated ones that no bundled model was trained on, or the user's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtx.build.calibration import Entry, read_calibration
from trtx.checkpoint.held_out import held_out_prompts
from trtx.config.wording import shown
from trtx.errors import UsageError
from trtx.text import load_hf_tokenizer, load_tokenizer

DEFAULT_COUNT = 192
MOST = 10_000  # their log-probabilities take a few gigabytes in a run directory


@dataclass(frozen=True, slots=True)
class FidelityPrompts:
    """``source``: description of the origin, for users. ``tokens``: token ids of each prompt."""

    source: str
    tokens: tuple[list[int], ...]


def read_prompts(asked: int | Path, model: Path) -> FidelityPrompts:
    """Generates ``asked`` prompts, or reads a JSONL file in the format of ``trtx build --calib``.

    ``model`` is the directory whose tokenizer and chat template are used. Raises UsageError.
    """
    tokenizer = load_tokenizer(model)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text).ids)

    if isinstance(asked, int):
        return FidelityPrompts(
            "generated, as trtx build's proof asks them", tuple(held_out_prompts(encode, asked)[:asked])
        )
    entries = read_calibration(asked, MOST + 1, "prompt file").entries
    if len(entries) > MOST:
        raise UsageError(f"prompt file {shown(asked)} has more than {MOST:,} prompts; shorten the file")
    template = None
    found = []
    for number, entry in enumerate(entries, start=1):
        if isinstance(entry, str):
            found.append(encode(entry))
        else:
            template = template or load_hf_tokenizer(model)
            found.append(_without_special(tokenizer, _rendered(template, entry, asked, number, model)))
    return FidelityPrompts(asked.name, tuple(found))


def _without_special(tokenizer: Any, text: str) -> list[int]:
    """Encodes text without adding special tokens, because the chat template has written them already."""
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def _rendered(template: Any, messages: Entry, file: Path, number: int, model: Path) -> str:
    try:
        return str(template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # raised by the template's code
        raise UsageError(
            f"prompt {number} of {shown(file)} does not go through the chat template of {model} "
            f"({shown(str(error) or type(error).__name__)}); give its text as "
            '{"text": …}, or another model'
        ) from error
