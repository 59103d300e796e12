"""Conversations as text and as tokens, rendered by the chat template that the checkpoint ships."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tool_conversations import Conversation

from trtx.checkpoint.tokenizer import IM_END, IM_START

NO_THOUGHT = "<think>\n\n</think>\n\n"
_BEGIN = f"{IM_START}assistant\n"


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a conversation's text. ``is_answer``: the model writes it; otherwise it is part of the prompt."""

    text: str
    is_answer: bool


def rendered(tokenizer: Any, conversation: Conversation) -> str:
    """The text of a conversation, as the template renders it up to the end of the model's last turn."""
    is_forced = conversation.forced is not None
    text: str = tokenizer.apply_chat_template(
        conversation.messages,
        tools=conversation.tools or None,
        tokenize=False,
        add_generation_prompt=is_forced,
    )
    return f"{text}{conversation.forced}{IM_END}" if is_forced else text.removesuffix("\n")


def pieces(text: str) -> Iterator[Piece]:
    """Yields a rendered conversation piece by piece: prompt, answer, prompt, answer."""
    before, *turns = text.split(_BEGIN)
    prompt = before
    for turn in turns:
        answer, end, after = turn.partition(IM_END)
        prompt += _BEGIN
        if answer.startswith(NO_THOUGHT):  # the template writes it
            prompt, answer = prompt + NO_THOUGHT, answer.removeprefix(NO_THOUGHT)
        yield Piece(prompt, is_answer=False)
        yield Piece(answer + end, is_answer=True)
        prompt = after
    if prompt:
        yield Piece(prompt, is_answer=False)


def encoded(encode: Callable[[str], list[int]], text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the token ids of a rendered conversation, and the range of each of the model's turns."""
    ids: list[int] = []
    answers = []
    for piece in pieces(text):
        more = encode(piece.text)
        if piece.is_answer:
            answers.append((len(ids), len(ids) + len(more)))
        ids += more
    return ids, answers
