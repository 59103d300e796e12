"""The answers that the HTTP proxy makes of Dynamo's streams: without calls that were cut, however bytes arrive."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trtx.frontend.cut_tool_calls import ToolAnswer, with_calls

CHAT = "/v1/chat/completions"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-request-id: 7\r\ntransfer-encoding: chunked\r\n\r\n"
CALL = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "get", "arguments": '{"a": 1}'}}


def event(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"role": "assistant", **delta}, "finish_reason": finish, "logprobs": None, **more}
    document = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


USAGE = (
    b'data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[],"usage":{"completion_tokens":3}}\n\n'
)
DONE = b"data: [DONE]\n\n"


def stream(*events: bytes, size: int = 50) -> bytes:
    body = b"".join(events)
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return HEAD + b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in pieces) + b"0\r\n\r\n"


def read(data: bytes, step: int, *, is_streamed: bool) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of what the client gets; ``data`` comes in pieces of ``step`` bytes."""
    answer = ToolAnswer(is_streamed=is_streamed)
    out = b"".join(answer.feed(data[at : at + step]) for at in range(0, len(data), step))
    assert answer.is_done
    head, _, body = out.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    if headers.get("transfer-encoding") == "chunked":
        whole = b""
        while (size := int(body.partition(b"\r\n")[0], 16)) > 0:
            start = body.index(b"\r\n") + 2
            whole, body = whole + body[start : start + size], body[start + size + 2 :]
        body = whole
    else:
        assert headers["content-length"] == str(len(body))
    return int(status.split()[1]), headers, body


@pytest.mark.parametrize("step", [1, 7, 64, 10_000])
def test_chunks_join_to_the_answer_that_is_no_stream(step: int) -> None:
    data = stream(
        event({"reasoning_content": "Hm"}),
        event({"reasoning_content": ", so."}),
        event({"content": "Grüße "}, logprobs={"content": [{"token": "a"}]}),
        event({"content": "", "tool_calls": [CALL]}, logprobs={"content": [{"token": "b"}]}),
        event({"content": "", "tool_calls": [{**CALL, "index": 1, "id": "call-2"}]}),
        event({}, "tool_calls"),
        USAGE,
        DONE,
    )
    status, headers, body = read(data, step, is_streamed=False)
    answer = json.loads(body)
    assert (status, headers["content-type"], headers["x-request-id"]) == (200, "application/json", "7")
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], answer["object"], answer["id"]) == ("tool_calls", "chat.completion", "c")
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("Grüße ", "Hm, so.")
    assert [call["id"] for call in message["tool_calls"]] == ["call-1", "call-2"]
    assert [call["function"] for call in message["tool_calls"]] == [CALL["function"]] * 2
    assert choice["logprobs"]["content"] == [{"token": "a"}, {"token": "b"}]
    assert answer["usage"] == {"completion_tokens": 3}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_call_that_the_length_cut_is_dropped_and_whole_ones_stay(is_streamed: bool) -> None:
    cut = {**CALL, "index": 1, "function": {"name": "ge", "arguments": "{}"}}
    data = stream(event({"tool_calls": [CALL]}), event({"content": "", "tool_calls": [cut]}, "length"), USAGE, DONE)
    _, _, body = read(data, 13, is_streamed=is_streamed)
    assert b'"get"' in body and b'"ge"' not in body and b'"length"' in body
    if not is_streamed:
        assert json.loads(body)["choices"][0]["message"]["tool_calls"][0]["function"] == CALL["function"]


@pytest.mark.parametrize(("is_forced", "text"), [(True, ""), (False, '[{"na')])
def test_the_beginning_of_a_forced_call_that_the_length_cut_is_no_text(is_forced: bool, text: str) -> None:
    answer = ToolAnswer(is_streamed=True, is_forced=is_forced)
    body = answer.feed(stream(event({"content": '[{"na'}, "length"), USAGE, DONE, size=10_000))
    (choice,) = next(json.loads(line[6:])["choices"] for line in body.split(b"\n") if line.startswith(b"data: {"))
    assert (choice["delta"].get("content", ""), choice["finish_reason"]) == (text, "length")


@pytest.mark.parametrize("step", [1, 10_000])
def test_a_stream_without_a_cut_call_arrives_as_it_was_sent(step: int) -> None:
    events = (event({"content": "a"}), b": comment\n\n", event({"tool_calls": [CALL]}), event({}, "tool_calls"), DONE)
    _, headers, body = read(stream(*events), step, is_streamed=True)
    assert body == b"".join(events) and headers["content-type"] == "text/event-stream"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_that_is_no_stream_arrives_as_it_was_sent(is_streamed: bool) -> None:
    body = b'{"message":"no","type":"Bad Request","code":400}'
    sent = (
        b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )
    status, _, found = read(sent, 5, is_streamed=is_streamed)
    assert (status, found) == (400, body)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        ({"message": "n is 2", "type": "Bad Request", "code": 400}, 400, "n is 2"),
        ({"error": {"message": "broken", "code": "internal"}}, 500, "broken"),
        ({"error": {}}, 500, "Internal server error"),
    ],
)
@pytest.mark.parametrize("before", [(), (event({"content": "a"}),)])
def test_an_error_of_a_stream_is_the_answer_with_its_status(
    error: dict[str, Any], status: int, said: str, before: tuple[bytes, ...]
) -> None:
    sent = (*before, b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n", DONE)
    found, _, body = read(stream(*sent), 9, is_streamed=False)
    assert (found, json.loads(body)["message"], json.loads(body)["code"]) == (status, said, status)
    found, _, body = read(stream(*sent), 9, is_streamed=True)
    assert (found, body) == (200, b"".join(sent))


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"tools": [CALL]}, "stream"),
        ({"stream": False, "tools": [CALL], "tool_choice": "auto"}, "stream"),
        ({}, None),
        ({"tools": []}, None),
        ({"tools": [CALL], "tool_choice": "none"}, None),
        ({"stream": True, "tools": [CALL]}, "as it is"),
        ({"stream": True}, None),
        ({"stream": True, "tools": [CALL], "tool_choice": "none"}, None),
        ({"tools": [CALL], "tool_choice": "required"}, None),
        ({"tools": [CALL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, None),
        ({"stream": True, "tools": [CALL], "tool_choice": "required"}, "as it is"),
        ({"stream": True, "tools": [CALL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "as it is"),
        ({"tools": [CALL], "n": 2}, None),
        ({"tools": [CALL], "stream": "yes"}, None),
        ({"tools": [CALL], "stream_options": {"include_usage": True}}, None),
    ],
)
def test_only_answers_that_a_parser_reads_are_read_here(fields: dict[str, Any], asked: str | None) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "é"}], **fields}).encode()
    found = with_calls(CHAT, body)
    if asked is None:
        assert found is None
        return
    assert found is not None
    assert found.is_streamed is (asked == "as it is")
    assert found.is_forced is ("tool_choice" in fields and fields["tool_choice"] != "auto")
    sent = {**fields, "stream": True} | ({} if found.is_streamed else {"stream_options": {"include_usage": True}})
    assert json.loads(found.body) == json.loads(body) | sent


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", b"{}"), (CHAT, b"no"), (CHAT, b"[]"), (CHAT, b'{"tools": [1], "tools": [2]}')],
)
def test_other_requests_are_not_read(path: str, body: bytes) -> None:
    assert with_calls(path, body) is None
