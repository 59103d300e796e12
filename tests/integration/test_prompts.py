"""Prompts that reach a worker are those of transformers' own ``apply_chat_template`` and tokenizer, to the token."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import HTTP, Topology, topology, until
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from trtx.checkpoint import resolve_checkpoint

pytestmark = pytest.mark.slow

CONSTRUCTS = {
    "printed values": "{{ true }} {{ none }} {{ [true, none, 'x', 1.0] }} {{ {'a': 1} }} {{ 1e20 }} {{ 7 / 2 }}",
    "methods of strings": "{{ 'a.b.c'.rsplit('.', 1)[0] }}{{ 'a_b'.partition('_')[2] }}{{ 'x y'.title() }}",
    "formatting": "{{ '%s-%02d' % ('a', 3) }} {{ '{}:{}'.format('a', 1) }}",
    "json": "{{ {'b': 1.0, 'a': '<é>'} | tojson(separators=(',', ':'), sort_keys=True) }}{{ messages[-1] | tojson }}",
    "tools": "{% for t in tools %}{{ t | tojson(indent=2) }}{% endfor %}",
    "tool calls": (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}"
        "{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}"
    ),
    "parts": "{% for m in messages %}{% for p in m.content or [] %}{{ p.text }}{% endfor %}{% endfor %}",
    "blocks": "{% generation %}{{ 'a' }}{% endgeneration %}{% for m in messages[::-1] %}{% if loop.index == 2 %}"
    "{% break %}{% endif %}{{ m.role }}{% endfor %}{% set n = namespace(x=1) %}{% set n.x = n.x + 1 %}{{ n.x }}",
    "kwargs": "{{ mood }}{{ enable_thinking is defined }}{{ documents is defined }}{{ add_generation_prompt }}",
    "keys": "{% for m in messages %}{{ m.keys() | list }}{% endfor %}{{ strftime_now('%Y') }}",
}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}},
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"n": 2, "f": 1.0, "x": [1, None, True]}}}
TEXTS = ["hello", "", " two  words\n", "\N{LATIN SMALL LETTER E WITH ACUTE}<|im_end|>x", "<|bos|>again"]


def with_begin_of_text(directory: Path, template: str | None) -> Path:
    """A checkpoint whose tokenizer adds a begin-of-text token, pads every text, and was saved so."""
    shutil.copytree(resolve_checkpoint("synthetic:tiny").path, directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    bos = ("<|bos|>", tokenizer.token_to_id("<|bos|>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A <|bos|> $B", special_tokens=[bos]
    )
    tokenizer.enable_padding(length=96, pad_id=0, pad_token="<|pad|>")
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").unlink()
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def every_construct() -> str:
    """One template that renders the construct that the last message names."""
    cases = [f"{{% if messages[-1].role == '{name}' %}}{text}{{% endif %}}" for name, text in CONSTRUCTS.items()]
    named = [case.replace("messages[-1].role", "construct") for case in cases]
    return "{{ bos_token }}" + "".join(named)


class Served:
    """A frontend as the launcher starts it, and a worker that writes its requests down."""

    def __init__(self, running: Topology, model: Path) -> None:
        self.running, self.model = running, model
        self.oracle: Any = AutoTokenizer.from_pretrained(model)
        self._file = running.directory / "requests.jsonl"

    def start(self) -> None:
        self.running.extra_environment |= {"TMPDIR": str(self.running.directory), "DYN_LOG": "warn"}
        self.running.start_frontend("--prompts-of", str(self.model))
        worker = str(Path(__file__).with_name("recording_worker.py"))
        self.running.spawn("recording", [worker, str(self.model), str(self._file)])
        self.running.wait_ready(aggregated=1)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return HTTP.post(f"{self.running.url}/v1/{path}", json={"model": "tiny", **body}, timeout=60)

    def prompts(self, path: str, body: dict[str, Any], count: int = 1) -> list[list[int]]:
        """The token ids that reached the worker."""
        self._file.write_text("")
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        return until("the worker's notes", lambda: self._written(count))

    def _written(self, count: int) -> list[list[int]] | None:
        lines = [json.loads(line) for line in self._file.read_text().splitlines()]
        found = [line["token_ids"] for line in lines if not line.get("_HEALTH_CHECK")]
        return found if len(found) >= count else None


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = with_begin_of_text(tmp_path_factory.mktemp("model") / "m", every_construct())
    with topology(tmp_path_factory.mktemp("served"), model) as running:
        found = Served(running, model)
        found.start()
        yield found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = with_begin_of_text(tmp_path_factory.mktemp("base") / "m", None)
    with topology(tmp_path_factory.mktemp("served-base"), model) as running:
        found = Served(running, model)
        found.start()
        yield found


def conversation(*, is_wire: bool) -> list[dict[str, Any]]:
    """As OpenAI's API has it, or as transformers does: arguments of a call as text, or as what it says."""
    call = json.loads(json.dumps(CALL))
    if is_wire:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    return [
        {"role": "system", "content": "s <b> & 'q'"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
        {"role": "user", "content": "u"},
    ]


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_a_chat_template_makes_the_prompt_that_transformers_makes(served: Served, construct: str) -> None:
    kwargs = {"construct": construct, "mood": True}
    wire = conversation(is_wire=True)
    (sent,) = served.prompts("chat/completions", {"messages": wire, "tools": [TOOL], "chat_template_kwargs": kwargs})
    messages = conversation(is_wire=False)
    if construct == "parts":  # prints parts alone, so strings come to it as parts
        messages = [
            {**one, "content": [{"type": "text", "text": one["content"]}]} if isinstance(one["content"], str) else one
            for one in messages
        ]
    expected = served.oracle.apply_chat_template(messages, tools=[TOOL], add_generation_prompt=True, **kwargs)
    assert sent == expected["input_ids"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_completion_has_the_tokens_that_the_tokenizer_adds(served: Served, text: str) -> None:
    assert served.prompts("completions", {"prompt": text}) == [served.oracle(text)["input_ids"]]


def test_several_texts_and_token_ids_are_prompts_of_their_own(served: Served) -> None:
    texts = ["one", "and two"]
    sent = served.prompts("completions", {"prompt": texts}, count=2)
    assert sorted(sent) == sorted(served.oracle(text)["input_ids"] for text in texts)
    assert served.prompts("completions", {"prompt": [70, 71]}) == [[70, 71]], "ids are the prompt as they are"


def test_what_dynamo_refuses_stays_refused(served: Served) -> None:
    for body in ({"messages": "x"}, {"messages": []}, {"messages": [{"role": "user", "content": "x"}], "no_such": 1}):
        assert served.post("chat/completions", body).status_code == 400
    headers = {"Content-Type": "application/json"}
    broken = HTTP.post(f"{served.running.url}/v1/completions", content=b"{", headers=headers, timeout=60)
    assert broken.status_code == 400
    assert HTTP.get(f"{served.running.url}/v1/models", timeout=60).json()["data"][0]["id"] == "tiny"


def test_a_model_without_a_template_completes_and_refuses_messages(base: Served) -> None:
    assert base.prompts("completions", {"prompt": "hello"}) == [base.oracle("hello")["input_ids"]]
    answer = base.post("chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert answer.status_code == 400 and "no chat template" in answer.json()["message"]
    streamed = base.post("chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True})
    assert streamed.status_code == 400


def _odd(chosen: random.Random, value: Any) -> Any:
    """``value`` with one of its parts replaced by a value of another type, or removed."""
    if isinstance(value, dict | list) and value and chosen.random() < 0.8:
        copy: Any = value.copy()
        at = chosen.choice([*copy]) if isinstance(copy, dict) else chosen.randrange(len(copy))
        if chosen.random() < 0.2:
            del copy[at]
        else:
            copy[at] = _odd(chosen, copy[at])
        return copy
    return chosen.choice([None, True, -1, 1e308, "", "\ud800", "x" * 500, [], [[]], {}, {"type": "text"}, [None, {}]])


def test_odd_bodies_get_an_answer_each_and_the_door_goes_on(served: Served) -> None:
    chosen = random.Random(11)
    chat = {"model": "tiny", "messages": conversation(is_wire=True), "tools": [TOOL], "max_tokens": 2}
    bodies = {
        "chat/completions": chat,
        "completions": {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 2},
        "responses": {"model": "tiny", "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]},
    }
    for number in range(120):
        path = chosen.choice([*bodies])
        sent = json.dumps(_odd(chosen, bodies[path])).encode()
        if number % 6 == 0:
            cut = chosen.randrange(len(sent))
            sent = sent[:cut] + bytes(chosen.choices(range(256), k=3)) + sent[cut + 3 :]
        headers = {"Content-Type": "application/json"}
        answer = HTTP.post(f"{served.running.url}/v1/{path}", content=sent, headers=headers, timeout=60)
        assert answer.status_code in (200, 400, 404, 415, 422, 501), f"{sent!r}: {answer.status_code} {answer.text}"
    assert served.prompts("completions", {"prompt": "hello"}) == [served.oracle("hello")["input_ids"]]


def test_a_frontend_that_was_killed_opens_its_door_again_on_the_same_port(served: Served) -> None:
    running = served.running
    (frontend,) = [child for child in running.children if child.name == "frontend"]
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        frontend.end(signal.SIGKILL)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
    running.children.remove(frontend)
    running.start_frontend("--prompts-of", str(served.model))
    running.wait_ready(aggregated=1)
    assert served.prompts("completions", {"prompt": "hello"}) == [served.oracle("hello")["input_ids"]]
