"""Bodies of a wrong form are refused in a sentence, or go on to Dynamo as they are: none fails the HTTP proxy."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from trtx.checkpoint import resolve_checkpoint
from trtx.frontend.rewriting import CHAT, COMPLETIONS, RESPONSES, rewrite
from trtx.prompts.maker import PromptMaker, Unrenderable


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> PromptMaker:
    model = tmp_path_factory.mktemp("model") / "m"
    shutil.copytree(resolve_checkpoint("synthetic:tiny").path, model)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return PromptMaker(model)


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "\ud800"}), (CHAT, user("\ud800")), (CHAT, user("x", tools="f")),
        (CHAT, user([{"type": ["x"], "text": "a"}])), (RESPONSES, {"input": "x", "tools": 5}),
        (CHAT, user("x", chat_template_kwargs={"self": 1})), (CHAT, user("x", chat_template_kwargs={"tokenize": True})),
    ],
)  # fmt: skip
def test_a_body_of_a_wrong_form_is_refused_in_a_sentence(maker: PromptMaker, path: str, body: Any) -> None:
    with pytest.raises(Unrenderable):
        rewrite(maker, path, json.dumps(body).encode())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'"x"',
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": ["a", 1]}',
        b'{"prompt": "\xff"}',
    ],
)
def test_what_is_no_request_goes_on_as_it_is(maker: PromptMaker, body: bytes) -> None:
    assert rewrite(maker, COMPLETIONS, body) == body
