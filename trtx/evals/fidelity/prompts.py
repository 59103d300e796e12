"""What the reference goes on with: generated prompts that no model here was trained on, or a person's own."""

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
MOST = 10_000  # some gigabytes of log-probabilities in a run directory


@dataclass(frozen=True, slots=True)
class Prompts:
    """``source``: where they come from, for people. ``tokens``: ids of each."""

    source: str
    tokens: tuple[list[int], ...]


def read_prompts(asked: int | Path, model: Path) -> Prompts:
    """``asked``: how many to make, or a JSONL file as ``trtx build --calib`` takes it. ``model``: whose tokenizer and
    chat template are used. Raises UsageError."""
    tokenizer = load_tokenizer(model)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text).ids)

    if isinstance(asked, int):
        return Prompts("generated, as trtx build's proof asks them", tuple(held_out_prompts(encode, asked)[:asked]))
    entries = read_calibration(asked, MOST + 1, "prompt file").entries
    if len(entries) > MOST:
        raise UsageError(f"prompt file {shown(asked)} has more than {MOST:,} prompts; expected fewer, so shorten it")
    template = None
    found = []
    for number, entry in enumerate(entries, start=1):
        if isinstance(entry, str):
            found.append(encode(entry))
        else:
            template = template or load_hf_tokenizer(model)
            found.append(_without_special(tokenizer, _rendered(template, entry, asked, number, model)))
    return Prompts(asked.name, tuple(found))


def _without_special(tokenizer: Any, text: str) -> list[int]:
    """A chat template writes the special tokens itself."""
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def _rendered(template: Any, messages: Entry, file: Path, number: int, model: Path) -> str:
    try:
        return str(template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # of the template's own code
        raise UsageError(
            f"prompt {number} of {shown(file)} does not go through the chat template of {model} "
            f"({shown(str(error) or type(error).__name__)}); give its text as "
            '{"text": …}, or another model'
        ) from error
