"""Checks the field names of a record, and suggests the field that was probably meant."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trtx.bench.datasets.forms import BODY_FIELDS
from trtx.bench.datasets.wrong_record import WrongRecord
from trtx.config.wording import quoted

if TYPE_CHECKING:
    from pydantic import BaseModel

# Other tools' names for a field, for hints where the names are not similar.
_OTHER_NAMES = {
    "text": "prompt",
    "max_tokens": "output_length",
    "max_completion_tokens": "output_length",
    "output_tokens": "output_length",
    "osl": "output_length",
    "prompt": "text",
    "question": "text",
    "instruction": "text",
    "input": "text",
    "isl": "input_length",
}


_NEAR = 0.7  # minimum similarity of two names, as computed by difflib, for a hint


def check_names(value: Mapping[str, Any], model: type[BaseModel], of: str = "") -> None:
    """Raises WrongRecord for a field that ``model``, or the model of an inner object, doesn't have.

    ``of``: the prefix of the names in messages.
    """
    from aiperf.common.models import Audio, Image, Text, Video
    from aiperf.dataset.loader.models import SingleTurn

    inner: dict[str, type[BaseModel]] = {"turns": SingleTurn}
    inner |= {"texts": Text, "images": Image, "audios": Audio, "videos": Video}
    known = frozenset(model.model_fields)
    for name, each in value.items():
        if name not in known:
            raise WrongRecord(f"unknown field {quoted(of + name)}", name, known)
        if name in inner and isinstance(each, list):
            for number, item in enumerate(each):
                if isinstance(item, dict):
                    check_names(item, inner[name], f"{of}{name}[{number}].")


def sentence_of(error: WrongRecord, form: str | None) -> str:
    """The error with a hint: the field that was probably meant, or where a field of the request body belongs."""
    if error.field is None:
        return str(error)
    known = error.known - {"type"}
    if error.field in BODY_FIELDS and "extra" in known:
        return f"{error}; write a field of the request body into extra: {{{json.dumps(error.field)}: …}}"
    near = next((one for one in known if one.lower() == error.field.lower()), _OTHER_NAMES.get(error.field))
    if near not in known:
        near = next(iter(difflib.get_close_matches(error.field, known, n=1, cutoff=_NEAR)), None)
    in_body = difflib.get_close_matches(error.field, BODY_FIELDS, n=1, cutoff=0.8)
    if near is None and in_body and "extra" in known:
        near = f"extra: {{{json.dumps(in_body[0])}: …}}"
    if near:
        return f"{error} of {form}; did you mean {near}?"
    shown = ", ".join(sorted(known)) if len(known) < 30 else "those of a chat request"
    otherwise = ", or write it into extra if it is a field of the request body" if "extra" in known else ""
    return f"{error} of {form}, which aiperf would not send; leave it out{otherwise}; known fields are {shown}"
