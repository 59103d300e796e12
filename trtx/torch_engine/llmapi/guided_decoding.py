"""``GuidedDecodingParams``: TensorRT-LLM's description of the text that an answer must follow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trtx.text import fast_tokenizer
from trtx.torch_engine.llmapi.grammar_limits import check_json, check_size
from trtx.torch_engine.llmapi.values import MAX_TOKEN_ID, Unsuitable, integer, is_text, shown
from trtx.torch_engine.sampling_plan import Grammar, GrammarKind

ANY_OBJECT = '{"type": "object"}'
"""The schema of ``json_object``."""
ANY_VALUE = "{}"
"""The object with the meaning of the schema ``true``, which the compiler does not take."""


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    """What an answer must follow; set exactly one of the first five fields. Raises ValueError for any other number.

    ``json``: a JSON schema, as text, mapping, or pydantic model. ``regex``: a regular expression of the whole answer,
    in the syntax of Rust's regex crate. ``grammar``: a context-free grammar, in Lark's or GBNF's syntax.
    ``json_object``: any JSON object. ``structural_tag``: the JSON text of structural tags, see
    :func:`trtx.torch_engine.core.grammars.structural_tags`.

    ``thinking_end_id`` and ``thinking_start_id`` are trtx's own. With ``thinking_end_id``, the grammar holds only for
    the text after that token. With ``thinking_start_id`` too, the answer either begins with that token and thinks, or
    follows the grammar at once.
    """

    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None
    thinking_end_id: int | None = None
    thinking_start_id: int | None = None

    def __post_init__(self) -> None:
        self.resolved()

    def resolved(self) -> Grammar:
        """Returns the grammar in the form in which it travels to the engine. Raises ValueError."""
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"GuidedDecodingParams sets {', '.join(given) or 'nothing'}; "
                f"expected exactly one of {', '.join(_KINDS)}"
            )
        name = given[0]
        value = getattr(self, name)
        text = ANY_OBJECT if name == "json_object" else _schema(value) if name == "json" else value
        if not isinstance(text, str) or not is_text(text) or not text.strip():
            raise ValueError(f"GuidedDecodingParams.{name} is {shown(value)}; expected Unicode text that is not empty")
        check_size(name, _KINDS[name], text)
        if name in ("json", "structural_tag"):
            check_json(name, text)
        after, opens = (_token_id(self, field) for field in ("thinking_end_id", "thinking_start_id"))
        if opens is not None and after is None:
            raise ValueError("GuidedDecodingParams.thinking_start_id needs thinking_end_id; set both")
        return Grammar(_KINDS[name], text, after, opens)


_KINDS: Mapping[str, GrammarKind] = {
    "json": "json", "regex": "regex", "grammar": "grammar", "json_object": "json", "structural_tag": "structural_tag",
}  # fmt: skip


def guided_decoding(value: Any) -> GuidedDecodingParams | None:
    """Accepts GuidedDecodingParams, and TensorRT-LLM's class of this name. It validates again, because the fields can
    be assigned to.
    """
    if value is None:
        return None
    names = [row.name for row in fields(GuidedDecodingParams)]
    if not isinstance(value, GuidedDecodingParams):
        if type(value).__name__ != GuidedDecodingParams.__name__:
            raise Unsuitable("GuidedDecodingParams or None")
        try:
            return GuidedDecodingParams(**{name: getattr(value, name) for name in names if hasattr(value, name)})
        except ValueError as error:
            raise Unsuitable(f"a valid one: {error}") from None
    try:
        value.resolved()
    except ValueError as error:
        raise Unsuitable(f"a valid one: {error}") from None
    return value


def _schema(value: Any) -> str:
    """The JSON text of a schema: text stays as it is, so that the order of its keys and its numbers are kept."""
    if isinstance(value, str):
        return ANY_VALUE if value.strip() == "true" else value
    if value is True:
        return ANY_VALUE
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"GuidedDecodingParams.json is {shown(value)}; expected a JSON schema: {error}") from None


def _token_id(params: GuidedDecodingParams, name: str) -> int | None:
    try:
        return integer(0, MAX_TOKEN_ID)(getattr(params, name))
    except Unsuitable as error:
        raise ValueError(f"GuidedDecodingParams.{name} is {shown(getattr(params, name))}; expected {error}") from None


def grammar_tokenizer(model_dir: Path, tokenizer: Any) -> str | None:
    """The path or text of the tokenizer.json from which grammars take the text of each token; None if there is none.

    ``tokenizer``: ``LLM``'s argument, a directory, a transformers tokenizer, or None for the model's own.
    """
    if tokenizer is not None and not isinstance(tokenizer, (str, Path)):
        backend: Any = fast_tokenizer(tokenizer)
        return str(backend.to_str())
    file = Path(tokenizer or model_dir) / "tokenizer.json"
    return str(file) if file.is_file() else None
