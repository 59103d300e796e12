"""Finds the token from which a grammar applies: it constrains the answer of a reasoning model, and not its reasoning.

Dynamo 1.6.1 doesn't tell workers: it sends ``require_reasoning`` with each request of a reasoning model, even if the
prompt has already ended the reasoning (ai-dynamo/dynamo #7831).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trtx.text import Tokenizer

_MARKS: Mapping[str, tuple[str, str]] = {"mistral": ("[THINK]", "[/THINK]"), "kimi": ("◁think▷", "◁/think▷")}
_USUAL_MARKS = ("<think>", "</think>")
_WITHOUT_MARKS = frozenset(("gpt_oss", "granite", "gemma4", "gemma-4", "inkling"))
"""Reasoning parsers for formats whose begin and end marks are not single tokens."""
_PROMPT_END = 16
"""Number of last prompt tokens that are searched for marks with which a chat template begins or ends the reasoning."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """The tokens with which a model begins and ends its thinking."""

    start_id: int
    end_id: int

    @classmethod
    def of(cls, parser: str | None, tokenizer: Tokenizer | None) -> Thinking | None:
        """The tokens for a reasoning parser of Dynamo; None if the model does not think, or has no such tokens."""
        if parser is None or parser in _WITHOUT_MARKS or tokenizer is None:
            return None
        found = [tokenizer.encode(mark, add_special_tokens=False).ids for mark in _MARKS.get(parser, _USUAL_MARKS)]
        if any(len(ids) != 1 for ids in found):
            return None
        return cls(found[0][0], found[1][0])

    def limits(self, prompt: Sequence[int]) -> dict[str, int]:
        """Arguments of ``GuidedDecodingParams`` for an answer to ``prompt``: after which token its grammar holds.

        If the prompt begins the thinking, the grammar holds after its end. If the prompt has ended the thinking, the
        grammar holds at once. After any other prompt, the model may think first or not.
        """
        for token in reversed(prompt[-_PROMPT_END:]):
            if token == self.end_id:
                return {}
            if token == self.start_id:
                return {"thinking_end_id": self.end_id}
        return {"thinking_end_id": self.end_id, "thinking_start_id": self.start_id}
