"""http: and https: against a server that answers badly: each gets its refusal, and holds nobody up."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
from media_server import OPEN, PICTURE, Server, serving

from trtx.media import MediaError, MediaLimits
from trtx.media.fetch import fetch


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as found:
        yield found


async def refusal(url: str, limits: MediaLimits = OPEN, **more: object) -> MediaError:
    """The error, after the checks that hold for all of them."""
    async with asyncio.timeout(50):  # below the limits of OPEN: what ends here hung
        with pytest.raises(MediaError) as refused:
            await fetch(url, limits, **more)  # type: ignore[arg-type]
    text = str(refused.value)
    assert len(text) < 300 and "\n" not in text, text
    assert "secret" not in text, text
    return refused.value


async def test_a_file_is_fetched_whole(server: Server) -> None:
    blob = await fetch(server.url("/picture?signature=secret"), OPEN)
    assert blob.data == PICTURE
    assert blob.label == server.url("/picture")
    (head,) = server.heads
    assert head.startswith(b"GET /picture?signature=secret HTTP/1.1\r\n")
    assert f"host: 127.0.0.1:{server.port}\r\n".encode() in head.lower()
    assert b"accept-encoding: identity\r\n" in head.lower()


async def test_what_a_server_calls_it_is_not_looked_at(server: Server) -> None:
    assert (await fetch(server.url("/lying-type"), OPEN)).data == PICTURE


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/too-short", 424, "closed the connection early"),
        ("/states-a-lot", 413, "larger than 1048576 bytes"),
        ("/endless", 413, "larger than 1048576 bytes"),
        ("/gzip-bomb", 415, "compressed its answer"),
        ("/headers-without-end", 424, "valid HTTP"),
        ("/no-http", 424, "valid HTTP"),
        ("/empty", 400, "no bytes"),
        ("/missing", 424, "answered 404"),
        ("/partial", 424, "answered 206"),
        ("/nowhere", 424, "redirects without an address"),
        ("/loop", 424, "more than 3 times"),
        ("/to?file:///etc/passwd", 403, "neither http: nor https:"),
        ("/to?data:,x", 403, "neither http: nor https:"),
        ("/to?ftp://127.0.0.1/x", 403, "neither http: nor https:"),
        ("/to?http://169.254.169.254/secret", 403, "private or reserved"),
        ("/to?http://[fe80::1]/", 403, "private or reserved"),
        ("/to?http://2852039166/", 403, "private or reserved"),
        ("/to?http://user:secret@127.0.0.1/", 400, "user name"),
        ("/to?http://[:::/", 424, "redirects to an invalid URL"),
        ("/to?http://127.0.0.1:99999/", 424, "redirects to an invalid URL"),
        ("/to?http://xn--/", 424, "redirects to an invalid URL"),
        ("/far", 424, "redirects to 9001 characters; expected at most 8192"),
    ],
)
async def test_a_bad_answer_is_a_sentence(server: Server, path: str, status: int, says: str) -> None:
    error = await refusal(server.url(path))
    assert (error.status, says in str(error)) == (status, True), str(error)


async def test_no_more_than_was_stated_is_taken(server: Server) -> None:
    """What follows a body is another answer to HTTP, and never looked at."""
    try:
        blob = await fetch(server.url("/too-long"), OPEN)
    except MediaError as error:
        assert error.status == 424
    else:
        assert blob.data == PICTURE[:100]


@pytest.mark.parametrize("path", ["/stops", "/silent"])
async def test_a_silent_server_is_left(server: Server, path: str) -> None:
    error = await refusal(server.url(path), OPEN.model_copy(update={"media_idle_s": 0.2}))
    assert (error.status, "said nothing for 0.2 s" in str(error)) == (408, True), str(error)


@pytest.mark.parametrize("path", ["/drips", "/drips-its-head"])
async def test_a_slow_server_is_left_although_it_is_never_idle(server: Server, path: str) -> None:
    error = await refusal(server.url(path), OPEN.model_copy(update={"media_timeout_s": 0.5}))
    assert (error.status, "after 0.5 s" in str(error)) == (408, True), str(error)


async def test_a_name_that_nobody_answers_for_is_left() -> None:
    async def never(host: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return ()

    error = await refusal("http://slow.example/", OPEN.model_copy(update={"media_timeout_s": 0.2}), resolve=never)
    assert error.status == 408


async def test_redirects_are_followed_within_their_bound(server: Server) -> None:
    url = server.url("/picture")
    for _ in range(3):
        url = server.url("/to?") + url
    assert (await fetch(url, OPEN)).data == PICTURE
    assert (await refusal(server.url("/to?") + url)).status == 424


async def test_a_relative_redirect_stays_at_its_host(server: Server) -> None:
    assert (await fetch(server.url("/to?/picture"), OPEN)).data == PICTURE


async def test_a_redirect_down_to_http_is_refused_where_http_is(server: Server) -> None:
    error = await refusal(server.url("/picture"), OPEN.model_copy(update={"allow_http_media": False}))
    assert (error.status, "--allow-http-media" in str(error), server.heads) == (403, True, [])


async def test_http_alone_opens_no_private_address(server: Server) -> None:
    error = await refusal(server.url("/picture"), OPEN.model_copy(update={"allow_private_media": False}))
    assert (error.status, "--allow-private-media" in str(error), server.heads) == (403, True, [])


class Answers:
    """A resolver that says something else each time, as the name server of an attacker may."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        return self.answers.pop(0)


async def test_the_address_that_was_checked_is_the_one_that_is_connected_to(server: Server) -> None:
    """There is no second lookup whose answer could be another: host and port stay in the request alone."""
    resolve = Answers(["127.0.0.1"], ["127.0.0.2"])
    blob = await fetch(server.url("/picture", "picture.example"), OPEN, resolve=resolve)
    assert blob.data == PICTURE
    assert resolve.asked == [("picture.example", server.port)]
    assert f"host: picture.example:{server.port}\r\n".encode() in server.heads[0].lower()


async def test_an_answer_that_changes_between_two_hops_is_checked_again(server: Server) -> None:
    resolve = Answers(["127.0.0.1"], ["169.254.169.254"])
    url = server.url("/to?" + server.url("/picture", "a.example"), "a.example")
    error = await refusal(url, resolve=resolve)
    assert (error.status, len(resolve.asked), len(server.heads)) == (403, 2, 1)
    assert "169.254" not in str(error), "a client learns nothing of the networks behind a worker"


@pytest.mark.parametrize("answer", [["127.0.0.1", "169.254.169.254"], ["169.254.169.254", "127.0.0.1"], ["x"]])
async def test_one_bad_address_of_several_refuses_the_host(server: Server, answer: list[str]) -> None:
    error = await refusal(server.url("/picture", "both.example"), resolve=Answers(answer))
    assert (error.status, server.heads) == (403, [])


async def test_a_host_that_is_down_at_one_address_is_reached_at_the_next(server: Server) -> None:
    resolve = Answers(["127.0.0.2", "127.0.0.1"])  # nobody listens at the first
    assert (await fetch(server.url("/picture", "two.example"), OPEN, resolve=resolve)).data == PICTURE


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("", 400),
        ("/etc/passwd", 400),
        ("x.png", 400),
        ("ftp://host/x", 400),
        ("javascript:alert(1)", 400),
        ("http://", 400),
        ("http:///x", 400),
        ("http:/127.0.0.1/x", 400),
        ("https://user:secret@host.example/", 400),
        ("http://host\r\nx-injected: 1/", 400),
        ("http://[::1/", 400),
        ("http://host:99999/", 400),
        ("http://127.0.0.1:65536/", 400),
        ("http://127.0.0.1:0/", 400),
        ("http://127.0.0.1:-1/", 400),
        ("http://xn--/", 400),
        ("http://xn--a.example/", 400),
        ("http://" + "a" * 10_000, 400),
        ("http://no-such-name.invalid/", 400),
        ("http://" + "a" * 300 + ".example/", 400),
        ("https://-.example/", 400),
    ],
)
async def test_what_is_no_url_of_a_medium_is_refused(url: str, status: int) -> None:
    assert (await refusal(url)).status == status


async def test_proxies_of_the_environment_are_not_asked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would resolve the name itself, and connect wherever it likes."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert (await fetch(server.url("/picture"), OPEN)).data == PICTURE


@pytest.mark.slow
async def test_300_mib_are_neither_taken_nor_kept(server: Server) -> None:
    """In a process of its own, whose memory nothing else has raised."""
    program = """
        import asyncio, resource, sys
        from trtx.media import MediaError, MediaLimits
        from trtx.media.fetch import fetch
        limits = MediaLimits(allow_http_media=True, allow_private_media=True, max_media_bytes=1 << 20)
        async def main():
            await fetch(sys.argv[1] + "/picture", limits)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for path in ("/endless", "/states-a-lot", "/gzip-bomb"):
                for _ in range(3):
                    try:
                        await fetch(sys.argv[1] + path, limits)
                    except MediaError as error:
                        assert error.status in (413, 415), error
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        asyncio.run(main())
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", textwrap.dedent(program), server.url("")), stdout=subprocess.PIPE, env=os.environ
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert int(output) < 16 << 10, f"memory grew by {int(output)} KiB over files of which 1024 KiB may be held"
    assert server.sent < 3 * (32 << 20), "the server was made to send on after the limit"
