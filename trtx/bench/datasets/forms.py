"""Converts records in the forms of other tools, which aiperf 0.13.0 can't read from a file, to aiperf's own forms.

A ShareGPT conversation is converted as by aiperf's ``sharegpt`` loader for the public dataset: each answered question
becomes a turn that requests as many output tokens as the answer has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trtx.bench.datasets.messages import check_messages
from trtx.bench.datasets.wrong_record import WrongRecord
from trtx.config.wording import quoted

SINGLE_TURN, MULTI_TURN, RANDOM_POOL, TRACE = "single_turn", "multi_turn", "random_pool", "mooncake_trace"
OPENAI_TURNS = "openai_turns"

_ASKS, _ANSWERS = ("human", "user"), ("gpt", "assistant", "chatgpt")
# Fields that describe a conversation or a message and have no effect on requests.
_SHAREGPT = {"id", "conversations", "source", "model"}
_SAID = {"from", "value", "role", "content", "markdown", "text", "weight", "loss"}
# Fields of a request body that the load sets itself, so a record's values are not sent.
_OF_THE_LOAD = ("model", "stream", "stream_options")
_SINGLE_CHOICE = ("n", "best_of")
_LOAD_FIELD_INSTEAD = {"ignore_eos": "load.ignore_eos of a sweep file", "min_tokens": "load.ignore_eos of a sweep file"}
_LIMITS = ("max_completion_tokens", "max_tokens")
BODY_FIELDS = frozenset({
    "audio", "bad_words", "cache_salt", "chat_template_args", "chat_template_kwargs", "frequency_penalty",
    "function_call", "functions", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
    "include_stop_str_in_output", "length_penalty", "logit_bias", "logprobs", "metadata", "min_p", "modalities",
    "nvext", "parallel_tool_calls", "prediction", "presence_penalty", "prompt_cache_key", "reasoning_effort",
    "repetition_penalty", "response_format", "safety_identifier", "seed", "service_tier", "skip_special_tokens", "stop",
    "stop_token_ids", "store", "temperature", "tool_choice", "tools", "top_k", "top_logprobs", "top_p", "user",
    "verbosity", "web_search_options",
})  # fmt: skip
# Fields that mark a record with messages as a request of aiperf's trace, not of OpenAI's API.
_OF_A_TRACE = {"output_length", "timestamp", "delay", "session_id", "extra", "hash_ids", "type"}
_OF_A_SESSION = ("session_id", "delay")  # requests with the same session_id are sent one after the other
_BODY = BODY_FIELDS | {"messages", "prompt", *_OF_THE_LOAD, *_SINGLE_CHOICE, *_LOAD_FIELD_INSTEAD, *_LIMITS}


@dataclass(frozen=True, slots=True)
class Converted:
    """A record in aiperf's form.

    ``values``: the records that replace it; none if it contains no request. ``answers``: the answer to each turn, in
    order; its number of tokens becomes the turn's output length. ``unsent``: fields that are not sent because the load
    sets them.
    """

    values: tuple[dict[str, Any], ...]
    answers: tuple[str, ...] = ()
    unsent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ForeignForm:
    """A form of another tool. ``sent_as``: the name of aiperf's form that ``convert`` returns."""

    name: str
    sent_as: str
    convert: Callable[[Any], Converted]


def _refuse_unknown(record: Mapping[str, Any], known: set[str] | frozenset[str], of: str = "") -> None:
    for name in record:
        if name not in known:
            raise WrongRecord(f"unknown field {quoted(of + name)}", name, frozenset(known))


def _text(record: Mapping[str, Any], name: str, of: str = "") -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise WrongRecord(f"{of}{name} is {value!r:.60}; expected text")
    return value


def _plain_text(line: Any) -> Converted:
    return Converted(({"text": line},))


def _sharegpt(record: Any) -> Converted:
    _refuse_unknown(record, _SHAREGPT)
    conversation = record.get("conversations")
    if not isinstance(conversation, list):
        raise WrongRecord('conversations is not a list; expected [{"from": "human", "value": "…"}, …]')
    turns: list[dict[str, Any]] = []
    answers: list[str] = []
    asked: str | None = None
    for number, message in enumerate(conversation):
        of = f"conversations[{number}]."
        if not isinstance(message, dict):
            raise WrongRecord(f"conversations[{number}] is not an object; expected one with from and value")
        _refuse_unknown(message, _SAID, of)
        message = {"value": message.get("content"), "from": message.get("role"), **message}
        role = message["from"]
        if role == "system" and not turns and asked is None:
            turns.append({"role": "system", "text": _text(message, "value", of)})
        elif role in _ASKS:
            asked = message.get("value")
        elif role in _ANSWERS:
            answer = message.get("value")
            if isinstance(asked, str) and asked and isinstance(answer, str) and answer:
                turns.append({"text": asked})
                answers.append(answer)
            asked = None
        else:
            raise WrongRecord(f"{of}from is {role!r:.60}; expected human, gpt, or, for the first message, system")
    session = {"session_id": str(record["id"])} if isinstance(record.get("id"), (str, int)) else {}
    return Converted(({**session, "turns": turns},) if answers else (), tuple(answers))


def _body(body: Mapping[str, Any], of: str = "") -> tuple[dict[str, Any], tuple[str, ...]]:
    """The output length and the other fields of a request body, and the names of the fields that the load sets."""
    _refuse_unknown(body, _BODY, of)
    for name in _SINGLE_CHOICE:
        if body.get(name) not in (None, 1):
            raise WrongRecord(
                f"{of}{name} is {body[name]!r:.60}, but only one choice per request is measured; leave it out"
            )
    for name, instead in _LOAD_FIELD_INSTEAD.items():
        if body.get(name):
            raise WrongRecord(
                f"{of}{name} is {body[name]!r:.60}; set it for all records with {instead}, and leave it out here"
            )
    limit = next((body[name] for name in _LIMITS if body.get(name) is not None), None)
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise WrongRecord(f"{of}max_tokens is {limit!r:.60}; expected a whole number of at least 1")
    extra = {name: value for name, value in body.items() if name in BODY_FIELDS - {"tools"} and value is not None}
    found = {**({"output_length": limit} if limit else {}), **({"extra": extra} if extra else {})}
    return found, tuple(name for name in _OF_THE_LOAD if body.get(name) is not None)


def _prompt(record: Any) -> Converted:
    tokens = record.get("output_tokens")
    body = {name: value for name, value in record.items() if name != "output_tokens"}
    if tokens is not None:
        if any(body.get(name) is not None for name in _LIMITS):
            raise WrongRecord("output_tokens and max_tokens both set the output length; leave one of them out")
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise WrongRecord(f"output_tokens is {tokens!r:.60}; expected a whole number of at least 1")
        body["max_tokens"] = tokens
    if "messages" in body:
        raise WrongRecord("prompt and messages both set the prompt; leave one of them out")
    fields, unsent = _body(body)
    return Converted(({"text": _text(record, "prompt"), **fields},), unsent=unsent)


def _chat(record: Any) -> Converted:
    body = {name: value for name, value in record.items() if name not in _OF_A_SESSION}
    if record.get("delay") is not None and record.get("session_id") is None:
        raise WrongRecord("delay has no effect without a session_id; add one, or leave delay out")
    value, unsent = _asked(body, "")
    return Converted(({**value, **{name: record[name] for name in _OF_A_SESSION if name in record}},), unsent=unsent)


def _turns(record: Any) -> Converted:
    """A recorded conversation: a request for each turn, which contains the messages of all earlier turns.

    Fields of the record apply to each turn that does not set them itself.
    """
    turns = record.get("turns")
    if not isinstance(turns, list) or not turns:
        raise WrongRecord('turns is not a list of requests; expected [{"messages": […]}, …]')
    common = {name: value for name, value in record.items() if name not in ("turns", "session_id")}
    if "messages" in common:
        raise WrongRecord("messages belongs to a turn; move it into turns[0]")
    session = record.get("session_id")
    if session is not None and (not isinstance(session, str) or not session):
        raise WrongRecord(f"session_id is {session!r:.60}; expected text")
    values, unsent, history = [], dict[str, None](), list[Any]()
    for number, turn in enumerate(turns):
        of = f"turns[{number}]."
        if not isinstance(turn, dict):
            raise WrongRecord(f"turns[{number}] is not an object; expected a request with messages")
        delay = turn.get("delay")
        if delay is not None and number == 0:
            raise WrongRecord(f"{of}delay is {delay!r:.60}, but no answer comes before the first turn; leave it out")
        added = turn.get("messages")
        first = added[0] if isinstance(added, list) and added and isinstance(added[0], dict) else {}
        if number and first and first.get("role") != "assistant":
            raise WrongRecord(
                f"{of}messages[0] has the role {first.get('role')!r:.60}; expected the assistant's recorded answer to "
                "the turn before, and then what follows it"
            )
        own = {name: value for name, value in turn.items() if name != "delay"}
        value, dropped = _asked({**common, **own, "messages": added}, of)
        history = [*history, *value["messages"]]
        check_messages(history, of, first=len(history) - len(value["messages"]))
        if history[-1].get("role") == "assistant":
            raise WrongRecord(
                f"{of}messages ends with an answer of the assistant; expected a message that the model answers"
            )
        unsent.update(dict.fromkeys(dropped))
        paused = {} if delay is None else {"delay": delay}
        values.append({**value, "messages": history, "session_id": session, **paused})
    return Converted(tuple(values), unsent=tuple(unsent))


def _batch(record: Any) -> Converted:
    _refuse_unknown(record, {"custom_id", "method", "url", "body"})
    if record.get("url") not in (None, "/v1/chat/completions"):
        raise WrongRecord(
            f"url is {record['url']!r:.60}; expected /v1/chat/completions, the only route that trtx bench measures"
        )
    if record.get("method") not in (None, "POST"):
        raise WrongRecord(f"method is {record['method']!r:.60}; expected POST, the method of every request")
    body = record.get("body")
    if not isinstance(body, dict):
        raise WrongRecord("body is not an object; expected a chat request with messages")
    value, unsent = _asked(body, "body.")
    return Converted((value,), unsent=unsent)


def _asked(body: Mapping[str, Any], of: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A chat request as a record of aiperf's trace, and the names of the fields that the load sets."""
    if "prompt" in body:
        raise WrongRecord(f"unknown field {of}'prompt' of a chat request; expected messages instead")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise WrongRecord(f'{of}messages is not a list of messages; expected [{{"role": "user", "content": "…"}}, …]')
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise WrongRecord(f"{of}messages[{number}] has no role; expected role and content")
    fields, unsent = _body(body, of)
    tools = {"tools": body["tools"]} if body.get("tools") else {}
    return {"messages": messages, **tools, **fields}, unsent


FOREIGN: Mapping[str, ForeignForm] = {
    form.name: form
    for form in (
        ForeignForm("plain_text", SINGLE_TURN, _plain_text),
        ForeignForm("sharegpt", MULTI_TURN, _sharegpt),
        ForeignForm("prompt", SINGLE_TURN, _prompt),
        ForeignForm("openai_chat", TRACE, _chat),
        ForeignForm("openai_batch", TRACE, _batch),
        ForeignForm(OPENAI_TURNS, TRACE, _turns),
    )
}


def foreign_form(record: Mapping[str, Any], trace_fields: frozenset[str]) -> ForeignForm | None:
    """The other tool's form that a record's field names indicate; None if they indicate none.

    ``trace_fields``: the fields of aiperf's trace, whose records can have messages as well.
    """
    if "conversations" in record:
        return FOREIGN["sharegpt"]
    turns = record.get("turns")
    if isinstance(turns, list) and any(isinstance(turn, dict) and "messages" in turn for turn in turns):
        return FOREIGN[OPENAI_TURNS]
    if "custom_id" in record or ("body" in record and "url" in record):
        return FOREIGN["openai_batch"]
    if "messages" in record and (record.keys() & (_BODY - trace_fields) or not record.keys() & _OF_A_TRACE):
        return FOREIGN["openai_chat"]
    return FOREIGN["prompt"] if "prompt" in record else None
