"""Bodies of a wrong form are refused in a sentence, or go on to Dynamo as they are: none fails the HTTP proxy."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from trtx.checkpoint import resolve_checkpoint
from trtx.frontend.rewriting import CHAT, COMPLETIONS, RESPONSES, rewrite
from trtx.prompts.rendering import PromptMaker, Unrenderable


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


def test_a_body_of_ill_formed_text_is_refused_with_the_place(maker: PromptMaker) -> None:
    with pytest.raises(Unrenderable, match="the body is not UTF-8 at byte 12: .*; send JSON in UTF-8"):
        rewrite(maker, COMPLETIONS, b'{"prompt": "\xff"}')


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (COMPLETIONS, b'{"prompt": "a", "seed": 1, "prompt": "b"}', "prompt"),
        (CHAT, b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "content"),
        (RESPONSES, b'{"input": "a", "temperature": 1, "temperature": 0}', "temperature"),
    ],
)
def test_a_name_that_occurs_twice_is_refused_because_one_value_would_be_lost(
    maker: PromptMaker, path: str, body: bytes, name: str
) -> None:
    with pytest.raises(Unrenderable, match=f'the body has the field "{name}" twice in one object; send it once'):
        rewrite(maker, path, body)


def test_a_long_prompt_leaves_the_processor_to_other_threads() -> None:
    """A thread that holds the GIL while it encodes would stop every stream of the frontend for as long."""
    maker = PromptMaker(resolve_checkpoint("synthetic:tiny-vl-trained").path)  # its tokenizer is BPE
    with ThreadPoolExecutor(1) as pool:
        seen = [time.monotonic()]
        made = pool.submit(maker.of_text, "a b " * 250_000)
        while not made.done():
            time.sleep(0.001)
            seen.append(time.monotonic())
    assert len(made.result()) >= 500_000
    longest = max(later - earlier for earlier, later in pairwise(seen))
    assert longest < (seen[-1] - seen[0]) / 2  # all of it with the GIL held


def test_a_prompt_far_beyond_the_context_is_refused_by_its_beginning() -> None:
    """Tokens of a body of 20 MB took 22 s of a core and 5 GB, and their ids no longer fitted into a body."""
    maker = PromptMaker(resolve_checkpoint("synthetic:tiny").path, read_context=lambda: 1000)
    for path, sent in ((CHAT, user("a b " * 100_000)), (COMPLETIONS, {"prompt": ["x", "a b " * 100_000]})):
        with pytest.raises(Unrenderable, match="more than 2000 tokens and the context holds 1000 .* at most 999"):
            rewrite(maker, path, json.dumps(sent).encode())
    assert len(maker.of_text("a b " * 50_000)) > 2000  # a worker refuses it, with its length


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'"x"',
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": ["a", 1]}',
    ],
)
def test_what_is_no_request_goes_on_as_it_is(maker: PromptMaker, body: bytes) -> None:
    assert rewrite(maker, COMPLETIONS, body) == body
