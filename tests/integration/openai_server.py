"""A server of OpenAI's API that is no trtx: transformers answers, greedily, with ``synthetic:tiny-trained``.

``echoes``: completions give log-probabilities of the prompt, as OpenAI's once did; else they refuse to.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from loopback import Handler, serving

from trtx.checkpoint import resolve_checkpoint

MODEL = "tiny-trained"


@dataclass
class OpenAIServer:
    """``asked``: bodies of what was answered. ``lasts``: answers after which it falls silent; None: it does not."""

    url: str = ""
    port: int = 0
    echoes: bool = True
    lasts: int | None = None
    delay_s: float = 0.0
    key: str | None = None  # that requests have to carry
    names: tuple[str, ...] = ()  # of models, that answers say in turn gave them
    says: str | None = None  # in place of what the model generates
    refuses: tuple[str, ...] = ()  # fields of a request that get a 400
    asked: list[dict[str, Any]] = field(default_factory=list)


class _Model:
    """One for all servers of a session, and one request at a time."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path: Path = resolve_checkpoint(f"synthetic:{MODEL}").path
        self.torch = torch
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.lock = Lock()

    def generate(self, ids: list[int], limit: int) -> str:
        with self.lock, self.torch.inference_mode():
            made = self.model.generate(self.torch.tensor([ids]), max_new_tokens=limit, do_sample=False)
        return str(self.tokenizer.decode(made[0][len(ids) :], skip_special_tokens=True))

    def logprobs(self, ids: list[int]) -> dict[str, list[Any]]:
        with self.lock, self.torch.inference_mode():
            rows = self.model(self.torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        own = rows.gather(1, self.torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        tops = [{"likeliest": value} for value in rows.max(-1).values.tolist()]
        return {"token_logprobs": [None, *own, -1.0], "top_logprobs": [None, *tops, {"made": -1.0}]}


_models: list[_Model] = []


def _model() -> _Model:
    if not _models:
        _models.append(_Model())
    return _models[0]


class _Handler(Handler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    of: OpenAIServer

    def _is_refused(self) -> bool:
        key = self.of.key
        if key is None or self.headers["Authorization"] == f"Bearer {key}":
            return False
        self.answer(401, {"error": {"message": "You didn't provide an API key."}})
        return True

    def do_GET(self) -> None:
        if self._is_refused():
            return
        of = self.of
        if of.lasts is not None and len(of.asked) >= of.lasts:
            self.close_connection = True  # gone, with its list
        elif self.path == "/v1/models":
            self.answer(200, {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "else"}]})
        else:
            self.answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = self.asked()
        if self._is_refused():
            return
        of = self.of
        if not {"prompt", "messages"} & body.keys():
            self.answer(400, {"error": {"message": "messages: Field required"}})
        elif "nvext" in body:
            self.answer(400, {"error": {"message": "nvext: Extra inputs are not permitted"}})
        elif unknown := next((name for name in of.refuses if name in body), None):
            self.answer(400, {"error": {"message": f"{unknown}: Extra inputs are not permitted"}})
        elif body.get("echo") and not of.echoes:
            self.answer(400, {"error": {"message": "echo is not supported"}})
        elif not body.get("echo") and of.lasts is not None and len(of.asked) >= of.lasts:
            self.close_connection = True  # and not a word
        else:
            time.sleep(of.delay_s)
            of.asked.append(body)
            named = {"model": of.names[len(of.asked) % len(of.names)]} if of.names else {}
            self.answer(200, {**named, "choices": [self._choice(body)]})

    def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        says = self.of.says
        if says is None or body.get("echo"):
            return self._generated(_model(), body)
        return self._said(body, says)

    def _generated(self, model: _Model, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("echo"):
            return {"index": 0, "text": "", "logprobs": model.logprobs(body["prompt"]), "finish_reason": "length"}
        if "messages" in body:
            encoded = model.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
            ids = encoded["input_ids"] if not isinstance(encoded, list) else encoded
        else:
            prompt = body["prompt"]
            ids = prompt if isinstance(prompt, list) else model.tokenizer.encode(prompt)
        return self._said(body, model.generate(ids, body["max_tokens"]))

    def _said(self, body: dict[str, Any], text: str) -> dict[str, Any]:
        for stop in body.get("stop", ()):
            text = text.split(stop)[0]
        answer = {"message": {"role": "assistant", "content": text}} if "messages" in body else {"text": text}
        return {"index": 0, **answer, "finish_reason": "stop"}


@contextlib.contextmanager
def openai_server(port: int = 0, **said: Any) -> Iterator[OpenAIServer]:
    """One that answers on loopback; at ``port``, where another one stood before."""
    of = OpenAIServer(**said)
    with serving(_Handler, port, of=of) as of.url:
        yield of
