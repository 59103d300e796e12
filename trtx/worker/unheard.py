"""Audio that Dynamo's frontend would drop without a word: ``input_audio`` in a chat message beside text alone.

The 1.4.2 frontend leaves such a part out, and shows a worker the messages only where images or videos are in them. Its
chat template sees every part, though. So a worker registers the checkpoint's template with a guard in front, which
begins the prompt of such a request with a mark, and refuses prompts that begin so. Of other requests not a character
changes. To go once the frontend hands audio on, or refuses it.

All workers of a topology register the same text, or Dynamo takes the second for one of another model: the mark follows
from the namespace. The frontend reads the file where the worker wrote it, so there is a guard on one machine alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from trtx.text import Tokenizer
from trtx.worker.request import InvalidRequest

_BEGINNING = 96
"""Tokens of a prompt in which the mark is looked for: each of its characters may be one."""
_FIRST = 8
"""Tokens in which the mark's first letters are: up to four may come before it, such as one for the beginning."""
_GUARD = (
    "{%% for message in messages %%}{%% if message['content'] is iterable and message['content'] is not string %%}"
    "{%% for part in message['content'] %%}{%% if part is mapping and part['type'] == 'input_audio' %%}"
    "%s{%% endif %%}{%% endfor %%}{%% endif %%}{%% endfor %%}"
)


def mark_of(namespace: str) -> str:
    """What no prompt begins with but one that the guard marked. Of letters and digits, which every tokenizer keeps."""
    return f"unheard{hashlib.blake2b(namespace.encode(), digest_size=8).hexdigest()}"


def guarded_template(model: Path, environment: Mapping[str, str]) -> Path | None:
    """The file of the checkpoint's chat template with the guard in front.

    None where there is no template, several, or one that begins with space, which means another thing behind a block;
    where the worker would have no tokenizer to find the mark with, and where the frontend may be on another machine.
    Raises OSError where the file can't be written.
    """
    directory = environment.get("TMPDIR")  # a topology's own; it goes with it
    template = _template(model) if (model / "tokenizer.json").is_file() else None
    if environment.get("DYN_DISCOVERY_BACKEND") != "file" or not directory or not template or template[0].isspace():
        return None
    text = _GUARD % mark_of(environment.get("DYN_NAMESPACE", "")) + template
    name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    path = Path(directory) / f"chat_template-{name}.jinja"
    if not path.exists():
        descriptor, part = tempfile.mkstemp(dir=directory)
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        Path(part).rename(path)  # whole, whoever else writes it
    return path


def _template(model: Path) -> str | None:
    """As Dynamo takes it: the file before the tokenizer's own."""
    try:
        if (path := model / "chat_template.jinja").is_file():
            return path.read_bytes().decode()
        found = json.loads((model / "tokenizer_config.json").read_bytes()).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def refuse_unheard(token_ids: Sequence[int], tokenizer: Tokenizer | None, mark: str) -> None:
    """Raises InvalidRequest for a prompt that begins with ``mark``."""
    if tokenizer is None:
        return
    if mark[:4] not in tokenizer.decode(list(token_ids[:_FIRST]), skip_special_tokens=False):
        return  # nearly always; the rest takes eight times as long
    if mark in tokenizer.decode(list(token_ids[:_BEGINNING]), skip_special_tokens=False):
        raise InvalidRequest(
            "the request brings input_audio, expected text, or images where the model takes them: no "
            "model here hears; send its words as text"
        )
