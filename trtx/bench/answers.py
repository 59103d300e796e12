"""Checks one response of an OpenAI API for completeness: the request's limits, the events received, and any fault.

Pure. It is the only such check: aiperf's endpoint (``endpoint/``) and the clients of ``benchmarks/`` both use it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

# Finish reasons with which the model ends an answer itself. All others ("error", "abort", "content_filter", …) cut it.
_STOPS = ("stop", "tool_calls", "function_call")
_COUNT_END = 2**53  # above it, programs that read JSON numbers as doubles disagree on the value
_WORDS = 200  # maximum number of characters kept of a server's message
_MODELS = 4  # maximum number of model names kept per answer; two are an error already
_TAG = re.compile(r"<(script|style)\b.*?</\1>|<[^>]*>", re.IGNORECASE | re.DOTALL)
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """The length and the form (stream or one document) that a request body demands of its answer."""

    streaming: bool
    max_tokens: int | None  # total over all choices; None: the request sets no limit
    min_tokens: int
    choices: int
    may_stop: bool  # the model's EOS or a stop string may end the answer early

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """Reads a request body as servers do: if a field has two names, the newer one wins."""
        limit = body.get("max_completion_tokens")
        limit = body.get("max_tokens") if limit is None else limit
        choices = int(body.get("n") or 1)
        stops = body.get("stop") or body.get("stop_token_ids")
        return cls(
            streaming=bool(body.get("stream")),
            max_tokens=None if limit is None else int(limit) * choices,
            min_tokens=int(body.get("min_tokens") or 0) * choices,
            choices=choices,
            may_stop=bool(stops) or not body.get("ignore_eos"),
        )


@dataclass(slots=True, eq=False)
class Answer:
    """Accumulates an answer: the events of a stream, or the single document of a non-streaming response."""

    error: str | None = None  # the server's error message
    is_done: bool = False  # ``[DONE]`` was seen
    texts: int = 0  # number of events with text
    finish_reasons: dict[int, str] = field(default_factory=dict)  # by choice; a reason that cuts the choice wins
    begun: set[int] = field(default_factory=set)  # indices of choices that had text
    _bodies: int = 0  # whole completions, which are not stream events
    models: list[str] = field(default_factory=list)  # distinct model names in the answer, at most _MODELS
    _model: object = None  # the last value of ``model``
    _garbled: str | None = None  # text received in place of JSON
    _foreign: str | None = None  # JSON that is not a completion
    _usage: Any = None

    def add_text(self, text: str) -> Any:
        """Adds the data of one event, or a whole body. Returns the decoded document, or None if there is none."""
        if text.strip() == "[DONE]":
            self.is_done = True
            return None
        try:
            document = json.loads(text)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            self._garbled = self._garbled or (words(text) if text.strip() else None)
            return None
        self.add(document)
        return document

    def add(self, document: Mapping[str, Any]) -> None:
        """Adds one decoded event or body. This is called for every event of a load, so it looks at each field once."""
        if document.get("error") or document.get("object") == "error":  # the latter: older vLLM
            self.error = self.error or words(document)
            return
        kind, choices = document.get("object"), document.get("choices")
        if not isinstance(choices, list) or not isinstance(kind, str):
            self._foreign = self._foreign or words(document)
            return
        if usage := document.get("usage"):
            self._usage = usage
        if (model := document.get("model")) != self._model:
            self._add_model(model)
        has_text, is_body = False, kind == "chat.completion"
        for choice in choices:
            if not isinstance(choice, dict):
                continue
            message = choice.get("message")
            is_body = is_body or isinstance(message, dict)
            part = choice.get("delta") or message or choice
            index = choice.get("index")
            index = index if isinstance(index, int) else 0
            if isinstance(part, dict) and _has_text(part):
                has_text = True
                self.begun.add(index)
            if reason := choice.get("finish_reason"):
                before = self.finish_reasons.get(index)
                if before is None or early_end(before) is None:
                    self.finish_reasons[index] = str(reason)
        self.texts += has_text
        self._bodies += is_body

    def _add_model(self, model: object) -> None:
        self._model = model
        name = model_name(model)
        if name is not None and name not in self.models and len(self.models) < _MODELS:
            self.models.append(name)

    @property
    def is_counted(self) -> bool:
        """Whether the server sent a usage. Without one, no metric that counts tokens can be computed."""
        return bool(self._usage)

    @property
    def tokens(self) -> int | None:
        """``usage.completion_tokens``, or None if it is missing or not a count."""
        tokens = self._usage.get("completion_tokens") if isinstance(self._usage, Mapping) else None
        return tokens if _is_count(tokens) else None

    def fault(self, asked: RequestedOutput) -> str | None:
        """The reason why the answer is incomplete or doesn't match the request, as one clause; None if it is complete.

        A complete answer has no error. Every choice has a finish reason, and a stream ends with ``[DONE]``. It has as
        many tokens as requested, or fewer if a stop may end it. A usage, if present, agrees with both.
        """
        if self.error is not None:
            return f"error in the answer: {self.error}"
        if self._garbled is not None:
            return f"the answer is not JSON: {self._garbled}"
        if len(self.finish_reasons) < asked.choices or not self.begun <= self.finish_reasons.keys():
            return self._what_is_missing()
        if len(self.finish_reasons) > asked.choices:
            return f"{len(self.finish_reasons)} choices ended, but {asked.choices} was requested"
        if asked.streaming and self._bodies:
            return "one whole body, but a stream was requested"
        if early := next(filter(None, map(early_end, self.finish_reasons.values())), None):
            return early
        if asked.streaming and not self.is_done:
            return "cut off: no [DONE]"
        return self._miscount(asked)

    def _what_is_missing(self) -> str | None:
        if self.texts or self.finish_reasons:
            return early_end(None)
        return "empty answer" if self._foreign is None else f"no completion in the answer: {self._foreign}"

    def _miscount(self, asked: RequestedOutput) -> str | None:
        stopped = any(reason in _STOPS for reason in self.finish_reasons.values())
        most = asked.max_tokens
        if not self.is_counted:
            return None if asked.may_stop or not stopped else "stopped by itself, although ignore_eos was requested"
        if (tokens := self.tokens) is None:
            return f"usage without a count of completion tokens: {words(self._usage)}"
        if miscounted := not_a_count(self._usage):
            return f"usage with {miscounted} that is not a count: {words(self._usage)}"
        if most is not None and tokens > most:
            return f"usage counts {tokens} tokens, but {most} were requested"
        if tokens == most:  # also with more text events: a server may flush held text, a proxy may re-chunk events
            return None
        if self.texts > tokens:
            return f"usage counts {tokens} tokens, but text came in {self.texts} pieces"
        if stopped and tokens < asked.min_tokens:
            return f"stopped after {tokens} tokens, although min_tokens {asked.min_tokens} was requested"
        if stopped and not asked.may_stop:
            return f"stopped after {tokens} tokens, although ignore_eos was requested"
        if not stopped and most is not None:
            return f"{tokens} of {most} tokens, with finish_reason 'length'"
        return None


def model_name(value: object) -> str | None:
    """The model name in a response's ``model`` field, short and on one line; None if it holds no name."""
    return words(value) or None if isinstance(value, str) else None


def early_end(finish_reason: object) -> str | None:
    """The reason why a choice with this ``finish_reason`` is incomplete, as one clause; None if it is complete."""
    if not finish_reason:
        return "cut off: no finish_reason"
    return None if finish_reason in (*_STOPS, "length") else f"ended early with finish_reason {finish_reason!r}"


def _has_text(part: Mapping[str, Any]) -> bool:
    return bool(part.get("content") or part.get("text") or part.get("reasoning_content") or part.get("reasoning"))


def not_a_count(usage: object) -> str | None:
    """The name of the field that makes a usage unusable; None if all its counts are valid.

    A count is a non-negative integer. Every field whose name ends in ``tokens`` must be a count or null, also in nested
    details. ``completion_tokens`` must be present.
    """
    if not isinstance(usage, Mapping):
        return "a form"
    if not _is_count(usage.get("completion_tokens")):
        return "completion_tokens"
    return _first_miscount(usage)


def _first_miscount(counts: Mapping[str, Any]) -> str | None:
    for name, value in counts.items():
        if isinstance(value, Mapping):
            if found := _first_miscount(value):
                return found
        elif name.endswith("tokens") and value is not None and not _is_count(value):
            return name
    return None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _COUNT_END


def words(value: object) -> str:
    """A server's message, short and on one line: the message of an error document, a page's title, or the text itself.

    Non-printable characters, which a terminal could interpret, are removed.
    """
    text = _message(value)
    if "<" in text and (title := _TITLE.search(text)):
        text = title.group(1)
    line = "".join(char if char.isprintable() else " " for char in _TAG.sub(" ", text))
    line = " ".join(line.split())
    return line if len(line) <= _WORDS else line[: _WORDS - 1] + "…"


def _message(value: object) -> str:
    """The innermost message: OpenAI's ``{"error": {"message"}}``, FastAPI's ``{"detail"}``, plain ``{"message"}``."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except ValueError:
            return str(value)
    if isinstance(value, Mapping):
        for name in ("error", "message", "detail", "msg"):
            if value.get(name):
                return _message(value[name])
    if isinstance(value, list) and value:
        return _message(value[0])
    return value if isinstance(value, str) else json.dumps(value)
