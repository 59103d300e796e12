"""The event that begins the stream of a prompt that the router left to a decode worker never reaches a client."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from functools import partial
from http.server import ThreadingHTTPServer
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback import Handler, listens, running
from processes import free_port, until

from trtx.frontend.bypass_events import CHUNK, EVENT, WithoutBypassEvents
from trtx.frontend.cut_tool_calls import ToolAnswer
from trtx.frontend.http_proxy import HttpProxy

OTHER = b'data: {"choices":[{"delta":{"content":"event: x-bypass-remote-prefill\\n: true\\n\\n"}}]}\n\n'
PIECES = [CHUNK, CHUNK[:-1], b"2", b"28\r\n", b"28\r\nevent: x-bypass", b"a" * 40, b"\r\n", EVENT, OTHER]


def chunk(data: bytes) -> bytes:
    return b"%X\r\n%b\r\n" % (len(data), data)


@given(st.lists(st.sampled_from(PIECES), max_size=6), st.lists(st.integers(0, 200), max_size=5))
def test_only_the_event_is_missing_however_the_bytes_are_cut(pieces: list[bytes], cuts: list[int]) -> None:
    data, events = b"".join(pieces), WithoutBypassEvents()
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    out = b"".join(events.feed(data[begin:end]) for begin, end in pairwise(places)) + events.end()
    assert out == data.replace(CHUNK, b"")


def test_a_whole_chunk_of_another_event_is_not_held_back() -> None:
    assert WithoutBypassEvents().feed(chunk(OTHER)) == chunk(OTHER)


class Dynamo(Handler):
    """Streams the event at the beginning and in the middle, as for a request that migrates, in pieces of a size."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        size = int(self.body())
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        data = b"".join(map(chunk, (EVENT, b"data: {}\n\n", EVENT, OTHER, b"data: [DONE]\n\n"))) + b"0\r\n\r\n"
        for begin in range(0, len(data), size):
            self.wfile.write(data[begin : begin + size])
            self.wfile.flush()

    def do_GET(self) -> None:
        self.answer(200, b"28")  # as the beginning of the chunk


@pytest.fixture(scope="module")
def proxy() -> Iterator[int]:
    with running(inner := ThreadingHTTPServer(("127.0.0.1", 0), Dynamo)):
        port = free_port()
        HttpProxy(("127.0.0.1", port), inner.server_port, None, body_limit=1000, drops_bypass_events=True).start()
        until("the proxy listens", partial(listens, port))
        yield port


@pytest.mark.parametrize("size", [1, 7, 45, 10_000])
def test_a_client_gets_the_stream_without_it_and_the_next_answers_whole(proxy: int, size: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", proxy, timeout=10)
    for _ in range(2):
        connection.request("POST", "/v1/completions", str(size))
        assert connection.getresponse().read() == b"data: {}\n\n" + OTHER + b"data: [DONE]\n\n"
        connection.request("GET", "/metrics")
        assert connection.getresponse().read() == b"28"
    connection.close()


@pytest.mark.parametrize("step", [1, 1000])
def test_an_answer_that_may_have_calls_lacks_it_too(step: int) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    data = head + chunk(EVENT) + chunk(OTHER) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    answer = ToolAnswer(is_streamed=True)
    out = b"".join(answer.feed(data[at : at + step]) for at in range(0, len(data), step))
    assert answer.is_done and OTHER in out and b"[DONE]" in out and EVENT not in out
