"""Refuses input that Dynamo's frontend would drop silently: ``input_audio`` in a chat message without images or videos,
and tools for a template that shows none.

Dynamo 1.6.1's frontend drops such a part, and passes messages on to a worker only if they contain images or videos. Its
chat template, however, sees every part. So a worker registers the checkpoint's template with a guard in front of it:
for a request with ``input_audio``, the guard makes the prompt begin with a mark, and the worker refuses prompts that
begin with the mark. Prompts of other requests are unchanged. Tools that the template does not read get another mark.
Remove this module once the frontend passes audio on or refuses it, and refuses such tools.

All workers of a topology must register the same text, or Dynamo treats them as serving different models; so the mark is
derived from the namespace. The frontend reads the template from the worker's file system, so the guard is used only
where the topology is on one machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from trtx.prompts.files import PROMPT_END
from trtx.prompts.formats import NO_TOOLS, reads_tools
from trtx.prompts.same import difference
from trtx.text import Tokenizer
from trtx.worker.options import PromptsBy
from trtx.worker.requests.invalid_request import InvalidRequest

_BEGINNING = 96
"""Number of leading prompt tokens in which the mark is looked for: a tokenizer may make each of its characters a token.
"""
_FIRST = 8
"""Number of leading tokens that contain the mark's first letters: up to four tokens may precede it, such as BOS."""
_UNHEARD, _UNRENDERED, _UNSHOWN = "unheard", "unrendered", "unshown"
_GUARD = (
    "{%% for message in messages %%}{%% if message['content'] is iterable and message['content'] is not string %%}"
    "{%% for part in message['content'] %%}{%% if part is mapping and part['type'] == 'input_audio' %%}"
    "%s{%% endif %%}{%% endfor %%}{%% endif %%}{%% endfor %%}"
)

_TOOLS_GUARD = "{%% if tools %%}%s{%% endif %%}"


def mark_of(namespace: str, kind: str = _UNHEARD) -> str:
    """The text that begins a prompt marked by the guard, and no other prompt.

    Consists of letters and digits, which every tokenizer preserves.
    """
    return f"{kind}{hashlib.blake2b(namespace.encode(), digest_size=8).hexdigest()}"


def registered_template(
    model: Path, environment: Mapping[str, str], *, prompts_by: PromptsBy, replacing: Path | None = None
) -> Path | None:
    """Path of the chat template that the worker registers; None for the checkpoint's own.

    ``replacing``: the file that replaces the checkpoint's template.

    If trtx's frontend renders the prompts, Dynamo's rendering is not used, and could fail on a template that
    transformers renders. In that case Dynamo's template is just a mark, and a prompt that bypassed trtx's frontend is
    refused by the mark. Raises OSError if the file can't be written.
    """
    directory = environment.get("TMPDIR")  # the topology's own directory, which is removed with it
    if environment.get("DYN_DISCOVERY_BACKEND") != "file" or not directory:
        return replacing
    text = None if replacing is None else replacing.read_bytes().decode()
    if prompts_by == "frontend" and difference(model, text) is not None:
        mark = mark_of(environment.get("DYN_NAMESPACE", ""), _UNRENDERED)
        return _written(f"{mark}{{{{ {PROMPT_END} }}}}", Path(directory))
    return guarded_template(model, environment, text) or replacing


def guarded_template(model: Path, environment: Mapping[str, str], replacing: str | None = None) -> Path | None:
    """Writes the checkpoint's chat template, or ``replacing``, with the guards in front of it, and returns its path.

    Raises OSError if the file can't be written. Returns None in these cases:

    - The checkpoint has no template or several, or its template begins with white space, which would mean something
      else after a block.
    - The worker has no tokenizer to find the mark with.
    - The frontend may be on another machine.
    """
    directory = environment.get("TMPDIR")  # the topology's own directory, which is removed with it
    template = replacing or _template(model) if (model / "tokenizer.json").is_file() else None
    if environment.get("DYN_DISCOVERY_BACKEND") != "file" or not directory or not template or template[0].isspace():
        return None
    namespace = environment.get("DYN_NAMESPACE", "")
    guards = _GUARD % mark_of(namespace)
    if not reads_tools(template):
        guards += _TOOLS_GUARD % mark_of(namespace, _UNSHOWN)
    return _written(guards + template, Path(directory))


def _written(text: str, directory: Path) -> Path:
    name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    path = directory / f"chat_template-{name}.jinja"
    if not path.exists():
        descriptor, part = tempfile.mkstemp(dir=directory)
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        Path(part).rename(path)  # atomic, because other workers may write the same file
    return path


def _template(model: Path) -> str | None:
    """The chat template in Dynamo's order of precedence: chat_template.jinja before tokenizer_config.json."""
    try:
        if (path := model / "chat_template.jinja").is_file():
            return path.read_bytes().decode()
        found = json.loads((model / "tokenizer_config.json").read_bytes()).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def refuse_unheard(token_ids: Sequence[int], tokenizer: Tokenizer | None, namespace: str) -> None:
    """Raises InvalidRequest if the prompt begins with a mark."""
    if tokenizer is None:
        return
    first = tokenizer.decode(list(token_ids[:_FIRST]), skip_special_tokens=False)
    if not any(kind[:4] in first for kind in (_UNHEARD, _UNRENDERED, _UNSHOWN)):
        return  # the usual case; the check below takes eight times as long
    beginning = tokenizer.decode(list(token_ids[:_BEGINNING]), skip_special_tokens=False)
    if mark_of(namespace, _UNRENDERED) in beginning:
        raise InvalidRequest(
            "Dynamo made the prompt of this request, and for this model it differs from transformers'; send messages "
            "to /v1/chat/completions, or a prompt to /v1/completions"
        )
    if mark_of(namespace, _UNSHOWN) in beginning:
        raise InvalidRequest(NO_TOOLS)
    if mark_of(namespace) in beginning:
        raise InvalidRequest(
            "the request contains input_audio, which no model takes here, expected text or images; send a transcript "
            "as text"
        )
