"""The table of docs/request-fields.md against the real frontend: what it refuses, drops, and hands to a worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from processes import HTTP, Topology, free_port, topology

from trtx.checkpoint import resolve_checkpoint
from trtx.text import load_tokenizer
from trtx.worker.multimodal.audio_guard import refuse_unheard
from trtx.worker.requests.invalid_request import InvalidRequest
from trtx.worker.requests.request import parse

DOCUMENT = Path(__file__).parents[2] / "docs" / "request-fields.md"
ROUTES = ("chat/completions", "completions", "responses")
CONTEXT, NAMESPACE = 4096, "trtx-fields"
# The parameters of chat.completions, completions and responses in OpenAI's Python package 3.54.0, but for the text.
OPENAI = """
    audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens metadata
    modalities moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key prompt_cache_options
    prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop store
    stream_options temperature tool_choice tools top_logprobs top_p user verbosity web_search_options stream
    best_of echo suffix
    access_programs background background_options context_management conversation image include instructions
    max_output_tokens max_tool_calls previous_response_id prompt reasoning text truncation
"""


class Row(NamedTuple):
    """``body`` is laid over a request; one with a ``type`` is a part of its message instead."""

    field: str
    body: dict[str, Any]
    fates: tuple[str, ...]


def rows() -> list[Row]:
    found = []
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) == 6:
            field, body, *fates, _ = cells
            found.append(Row(field.strip("`"), json.loads(body.strip("`")), tuple(fates)))
    return found


def routes() -> list[tuple[str, str, int, str]]:
    """Of each route of the page: method, path, status, and the beginning of what the client sees."""
    text = DOCUMENT.read_text(encoding="utf-8").partition("## Routes")[2].partition("\n## ")[0]
    found = []
    for line in text.splitlines():
        if line.startswith("| `"):
            route, status, seen = (cell.strip() for cell in line.strip("|").split(" | "))
            method, path = route.strip("`").split(" ")
            found.append((method, path, int(status), seen))
    return found


class Recorder(NamedTuple):
    running: Topology
    file: Path

    def post(self, route: str, body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        """The status that the client sees, and what reached the worker."""
        before = self._lines()
        whole = {"model": self.running.model_name, **request(route, body)}
        status = HTTP.post(f"{self.running.url}/v1/{route}", json=whole, timeout=60).status_code
        return status, [json.loads(line) for line in self._lines()[len(before) :]]

    def _lines(self) -> list[str]:
        return self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []


def request(route: str, body: dict[str, Any]) -> dict[str, Any]:
    if route == "completions":
        return {"prompt": "hello", "max_tokens": 4, **body}
    parts = [body] if "type" in body else []
    fields = {} if parts else body
    if route == "responses":
        content = [{"type": "input_text", "text": "hello"}, *parts]
        return {"input": [{"type": "message", "role": "user", "content": content}], "max_output_tokens": 4, **fields}
    content = [{"type": "text", "text": "hello"}, *parts]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}


def held(seen: dict[str, Any]) -> dict[str, Any]:
    """Without what is there and empty: any ``nvext`` at all brings empty routing hints."""
    return {name: value for name, value in seen.items() if value not in (None, {}, [])}


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    directory = tmp_path_factory.mktemp("recorder")
    model = resolve_checkpoint("synthetic:tiny").path
    with topology(directory, model) as running:
        # the worker writes its chat template there, as where trtx serves
        running.extra_environment |= {"TMPDIR": str(directory), "DYN_NAMESPACE": NAMESPACE}
        running.start_frontend()
        argv = [str(Path(__file__).with_name("recording_worker.py")), str(model), str(directory / "requests.jsonl")]
        running.spawn("recorder", argv, {"DYN_SYSTEM_PORT": str(free_port())})
        running.wait_ready(aggregated=1)
        yield Recorder(running, directory / "requests.jsonl")


@pytest.fixture(scope="module")
def plain(recorder: Recorder) -> dict[str, dict[str, Any]]:
    """By route, what reaches the worker when nothing but text and a length is asked for."""
    found = {}
    for route in ROUTES:
        status, (seen,) = recorder.post(route, {})
        assert status == 200
        assert parse(seen, context_length=CONTEXT).sampling["max_tokens"] == 4
        found[route] = seen
    return found


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.field)
def test_the_frontend_does_with_a_field_what_the_table_says(
    recorder: Recorder, plain: dict[str, dict[str, Any]], row: Row
) -> None:
    for route, fate in zip(ROUTES, row.fates, strict=True):
        if fate == "–":
            continue
        status, seen = recorder.post(route, row.body)
        assert str(status) == (fate if fate.isdigit() else "200"), route
        assert bool(seen) is (status == 200), route
        if not seen:
            continue
        reached = held(seen[0]) != held(plain[route])
        assert reached is (fate in ("honoured", "refused", "in part")), (route, seen[0])
        try:
            parse(seen[0], context_length=CONTEXT)
            refuse_unheard(seen[0]["token_ids"], load_tokenizer(recorder.running.model), NAMESPACE)
            refused = False
        except InvalidRequest:
            refused = True
        assert refused is (fate == "refused"), (route, seen[0])


@pytest.mark.parametrize(("method", "path", "status", "seen"), routes(), ids=lambda value: str(value)[:30])
def test_a_route_answers_as_the_page_says(recorder: Recorder, method: str, path: str, status: int, seen: str) -> None:
    fields = (
        request("chat/completions", {}) if path.endswith(("completions", "messages")) else {"prompt": "x", "input": "x"}
    )
    body = {"model": recorder.running.model_name, **fields} if method == "POST" else None
    answer = HTTP.request(method, f"{recorder.running.url}{path}", json=body, timeout=60)
    assert answer.status_code == status
    if seen.startswith("An empty body"):
        assert answer.text == "" and "access-control-allow-origin" not in answer.headers
    elif status == 404:
        assert answer.json()["message"].startswith(seen.split("`")[1])


def test_the_table_has_every_documented_field() -> None:
    named = {row.field.split(" ")[0] for row in rows()}
    assert set(OPENAI.split()) - named == set()
