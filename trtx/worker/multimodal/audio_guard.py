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

from trtx.prompts.same import difference
from trtx.text import Tokenizer
from trtx.worker.options import PromptsBy
from trtx.worker.requests.invalid_request import InvalidRequest

_BEGINNING = 96
"""Tokens of a prompt in which the mark is looked for: each of its characters may be one."""
_FIRST = 8
"""Tokens in which the mark's first letters are: up to four may come before it, such as one for the beginning."""
_UNHEARD, _UNRENDERED = "unheard", "unrendered"
_GUARD = (
    "{%% for message in messages %%}{%% if message['content'] is iterable and message['content'] is not string %%}"
    "{%% for part in message['content'] %%}{%% if part is mapping and part['type'] == 'input_audio' %%}"
    "%s{%% endif %%}{%% endfor %%}{%% endif %%}{%% endfor %%}"
)


def mark_of(namespace: str, kind: str = _UNHEARD) -> str:
    """What no prompt begins with but one that the guard marked. Of letters and digits, which every tokenizer keeps."""
    return f"{kind}{hashlib.blake2b(namespace.encode(), digest_size=8).hexdigest()}"


def registered_template(model: Path, environment: Mapping[str, str], *, prompts_by: PromptsBy) -> Path | None:
    """The file of the chat template that the worker registers; None: the checkpoint's own.

    Where trtx's frontend makes the prompts, Dynamo's rendering counts for nothing, and could fail over a template that
    transformers renders. So Dynamo gets a mark as its template, and a prompt that went past the frontend's door is
    refused by that mark.
    Raises OSError where the file can't be written.
    """
    directory = environment.get("TMPDIR")  # a topology's own; it goes with it
    if environment.get("DYN_DISCOVERY_BACKEND") != "file" or not directory:
        return None
    if prompts_by == "frontend" and difference(model) is not None:
        return _written(mark_of(environment.get("DYN_NAMESPACE", ""), _UNRENDERED), Path(directory))
    return guarded_template(model, environment)


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
    return _written(_GUARD % mark_of(environment.get("DYN_NAMESPACE", "")) + template, Path(directory))


def _written(text: str, directory: Path) -> Path:
    name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    path = directory / f"chat_template-{name}.jinja"
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


def refuse_unheard(token_ids: Sequence[int], tokenizer: Tokenizer | None, namespace: str) -> None:
    """Raises InvalidRequest for a prompt that begins with a mark."""
    if tokenizer is None:
        return
    first = tokenizer.decode(list(token_ids[:_FIRST]), skip_special_tokens=False)
    if _UNHEARD[:4] not in first and _UNRENDERED[:4] not in first:
        return  # nearly always; the rest takes eight times as long
    beginning = tokenizer.decode(list(token_ids[:_BEGINNING]), skip_special_tokens=False)
    if mark_of(namespace, _UNRENDERED) in beginning:
        raise InvalidRequest(
            "Dynamo made the prompt of this request, and for this model it differs from transformers'; send messages "
            "to /v1/chat/completions, or a prompt to /v1/completions"
        )
    if mark_of(namespace) in beginning:
        raise InvalidRequest(
            "the request brings input_audio, expected text, or images where the model takes them: no "
            "model here hears; send its words as text"
        )
