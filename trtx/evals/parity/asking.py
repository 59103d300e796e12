"""Sends all prompts of a run once, as concurrent streams, and disconnects from those that are to be cancelled.

With Dynamo 1.6.1, every event names the worker to which the request was sent (``nvext.worker_id``); a migration doesn't
change it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from trtx.bench.answers import Answer as Whole
from trtx.bench.answers import RequestedOutput, model_name, words
from trtx.evals.parity.forms import ParityAnswer, Prompt
from trtx.tls import trust_of

TOP = 5  # number of alternatives per position, the maximum of OpenAI's completions
_TIMEOUT_S = 600.0
_ATTEMPTS = 3  # tries of a request that fails before its first token, e.g. on a worker that has just died
_PAUSE_S = 0.5
_LOOK_S = 0.02
_AT_ONCE_S = 0.01  # time after which a client disconnects without reading
_TOKEN = "token_id:"  # prefix of ids with return_tokens_as_token_ids


@dataclass(frozen=True, slots=True)
class Server:
    """A server, and its capabilities."""

    url: str  # without /v1
    model: str  # the served name
    api_key: str | None = None
    takes_nvext: bool = True  # Dynamo's extensions: a cache salt, and the worker that answered
    gives_prompt_logprobs: bool = True


@dataclass(slots=True, eq=False)
class Pass:
    """One pass over all prompts, during and after its execution."""

    under_way: dict[int, Stream] = field(default_factory=dict)  # compared requests
    answers: dict[int, ParityAnswer] = field(default_factory=dict)
    cancelled: int = 0  # number of clients that disconnected early
    too_late: int = 0  # number of clients that were to disconnect early but already had the whole answer
    unreached: str | None = None  # error of the last request that got no response; None: all got one

    @property
    def ended(self) -> int:
        return len(self.answers) + self.cancelled + self.too_late


async def ask_all(
    server: Server,
    prompts: Sequence[Prompt],
    *,
    salt: str,
    osl: int,
    concurrency: int,
    check: Callable[[], None],
    watch: Callable[[Pass], None],
) -> Pass:
    """Runs until each prompt has an answer or has failed. Answers are greedy and exactly ``osl`` tokens long.

    Passes with different ``salt`` share no cached KV, if the server supports salts. ``watch`` and ``check`` are called
    50 times a second and may raise; then all requests are aborted and the exception is re-raised.
    """
    state, waiting = Pass(), iter(prompts)
    async with _client(server, concurrency) as http:

        async def client() -> None:
            for prompt in waiting:
                asked = prompt if server.gives_prompt_logprobs else replace(prompt, asks_prompt_logprobs=False)
                body = request_body(server, asked, osl=osl, salt=salt)
                if asked.is_compared:
                    state.answers[asked.index] = await _answer(http, body, asked, state)
                else:
                    await _leave(http, body, asked, state)

        clients = {asyncio.create_task(client()) for _ in range(concurrency)}
        pending = clients
        try:
            while pending:
                check()
                watch(state)
                done, pending = await asyncio.wait(pending, timeout=_LOOK_S)
                for ended in done:
                    ended.result()
        finally:
            for one in clients:
                one.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        watch(state)
    return state


def ask_once(server: Server, prompt: Prompt, *, osl: int) -> ParityAnswer:
    """Sends one prompt once, to probe whether a server returns the compared values."""
    return asyncio.run(_ask_once(server, prompt, osl))


async def _ask_once(server: Server, prompt: Prompt, osl: int) -> ParityAnswer:
    gathered = Stream()
    async with _client(server, 1) as http:
        failure = await _stream(http, request_body(server, prompt, osl=osl, salt="probe"), gathered, lambda: True)
    return gathered.answer(prompt, 1, failure)


def _client(server: Server, concurrency: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    headers = {} if server.api_key is None else {"Authorization": f"Bearer {server.api_key}"}
    return httpx.AsyncClient(
        base_url=f"{server.url}/v1/",
        timeout=_TIMEOUT_S,
        limits=limits,
        headers=headers,
        trust_env=False,
        verify=trust_of(server.url),
    )


def request_body(server: Server, prompt: Prompt, *, osl: int, salt: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": list(prompt.token_ids),
        "max_tokens": osl,
        "min_tokens": osl,
        "ignore_eos": True,
        "temperature": 0.0,
        "logprobs": TOP,
        "return_tokens_as_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if server.takes_nvext:
        body["nvext"] = {"cache_salt": salt, "extra_fields": ["engine_data", "worker_id"]}
    if prompt.asks_prompt_logprobs:
        body["prompt_logprobs"] = 1
    return body


async def _answer(http: httpx.AsyncClient, body: Mapping[str, Any], prompt: Prompt, state: Pass) -> ParityAnswer:
    attempts = 0
    while True:
        attempts += 1
        gathered = Stream()
        state.under_way[prompt.index] = gathered
        failure = await _stream(http, body, gathered, lambda: True)
        del state.under_way[prompt.index]
        if failure is not None and not gathered.has_word:
            state.unreached = failure
        if failure is None or gathered.token_ids or attempts == _ATTEMPTS:
            return gathered.answer(prompt, attempts, failure)
        await asyncio.sleep(_PAUSE_S)


async def _leave(http: httpx.AsyncClient, body: Mapping[str, Any], prompt: Prompt, state: Pass) -> None:
    """Starts a request and disconnects. Its content and its errors are ignored."""
    wanted, gathered = prompt.cancel_after or 0, Stream()
    try:
        async with asyncio.timeout(_AT_ONCE_S if wanted == 0 else _TIMEOUT_S):
            await _stream(http, body, gathered, lambda: wanted == 0 or gathered.events < wanted)
    except TimeoutError:
        pass
    if gathered.finish_reason is None:
        state.cancelled += 1
    else:
        state.too_late += 1


async def _stream(
    http: httpx.AsyncClient, body: Mapping[str, Any], gathered: Stream, goes_on: Callable[[], bool]
) -> str | None:
    """Reads one stream event by event while ``goes_on``. Returns why the answer is incomplete, or None if it is
    complete.
    """
    whole = Whole()
    try:
        async with http.stream("POST", "completions", json=body) as answer:
            gathered.has_word = True
            if not answer.is_success:
                reason = words((await answer.aread()).decode(errors="replace")) or "no reason given"
                return f"HTTP {answer.status_code}: {reason}"
            async for line in answer.aiter_lines():
                if line.startswith("data:"):
                    document = whole.add_text(line.removeprefix("data:").strip())
                    if document is not None:
                        gathered.take(document)
                    if not goes_on():
                        return "the client left"
    except httpx.ReadTimeout:
        return f"nothing came for {_TIMEOUT_S:g} s"
    except httpx.RequestError as error:
        return " ".join(str(error).split()) or type(error).__name__
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return f"log-probabilities that can't be read ({type(error).__name__}: {error})"
    return whole.fault(RequestedOutput.of(body))


@dataclass(slots=True, eq=False)
class Stream:
    """The content of one stream so far."""

    has_word: bool = False  # the server responded at all
    events: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)
    prompt_rows: list[Mapping[str, Any] | None] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    workers: dict[str, int] = field(default_factory=dict)  # by role
    models: dict[str, None] = field(default_factory=dict)

    @property
    def worker(self) -> int | None:
        """Dynamo's id of the worker that got the request; None: not reported yet."""
        return self.workers.get("decode")

    def take(self, document: Mapping[str, Any]) -> None:
        """Adds one event. Raises KeyError, TypeError or ValueError for one in an unexpected format."""
        self.events += 1
        self.usage = document.get("usage") or self.usage
        if (model := model_name(document.get("model"))) is not None:
            self.models[model] = None
        extra = document.get("nvext") or {}
        self.prompt_rows = (extra.get("engine_data") or {}).get("prompt_logprobs") or self.prompt_rows
        for name, value in (extra.get("worker_id") or {}).items():
            if name.endswith("_worker_id") and value is not None:
                self.workers[name.removesuffix("_worker_id")] = int(value)
        for choice in document.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if told := choice.get("logprobs"):
                self.token_ids += [_id(token) for token in told["tokens"]]
                self.logprobs += [_finite(value) for value in told["token_logprobs"]]
                self.top += [_likeliest(row) for row in told["top_logprobs"]]

    def answer(self, prompt: Prompt, attempts: int, failure: str | None) -> ParityAnswer:
        prompt_logprobs: tuple[float, ...] = ()
        resent = None
        if prompt.asks_prompt_logprobs and failure is None:
            try:
                rows = list(self.prompt_rows)
                rows = rows[1:] if rows and rows[0] is None else rows  # the first token has no predecessor
                resent = len(rows) - (len(prompt.token_ids) - 1)
                prompt_logprobs = tuple(_of_prompt(rows, prompt.token_ids[1:]))
            except (KeyError, TypeError, ValueError, AttributeError):
                failure = "no log-probabilities of its prompt that can be read, and they were asked for"
        if failure is None and not len(self.token_ids) == len(self.logprobs) == len(self.top):
            failure = f"{len(self.token_ids)} tokens with {len(self.logprobs)} log-probabilities"
        if failure is None and not all(self.top):
            failure = "a token without its most likely alternatives"
        return ParityAnswer(
            index=prompt.index,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            top=tuple(self.top),
            prompt_logprobs=prompt_logprobs,
            finish_reason=self.finish_reason,
            prompt_tokens=self.usage.get("prompt_tokens"),
            cached_tokens=(self.usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            workers=self.workers,
            resent=resent,
            attempts=attempts,
            failure=failure,
            models=tuple(self.models),
        )


def _likeliest(row: Any) -> dict[str, float]:
    """Log-probabilities by id, from Dynamo's list of {token, logprob} or the mapping of OpenAI's completions."""
    pairs = row.items() if isinstance(row, Mapping) else ((one["token"], one["logprob"]) for one in row)
    return {str(_id(token)): _finite(value) for token, value in pairs}


def _id(token: str) -> int:
    return int(token.removeprefix(_TOKEN))


def _finite(value: Any) -> float:
    found = float(value)
    if not math.isfinite(found):
        raise ValueError(f"{value!r} is not a finite number")
    return found


def _of_prompt(rows: Sequence[Mapping[str, Any] | None], tokens: Sequence[int]) -> Iterator[float]:
    """The log-probability of each token, from rows of {token: {"logprob": …}}.

    Raises KeyError, TypeError or ValueError if one is missing.
    """
    if len(rows) < len(tokens):
        raise ValueError(f"{len(rows)} rows for {len(tokens)} tokens")
    for row, token in zip(rows, tokens, strict=False):
        if row is None:
            raise ValueError("a row is empty")
        yield _finite(row[str(token)]["logprob"])
