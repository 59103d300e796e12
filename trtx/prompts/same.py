"""Proves from a checkpoint's files that Dynamo's frontend makes the same prompts as transformers.

Dynamo 1.6.1 renders chat templates with minijinja. Unlike transformers' Jinja, it lacks Python's string methods and
prints strings in lists and mappings differently. Dynamo also encodes text without the special tokens that the
tokenizer adds (ai-dynamo/dynamo #4610). Example conversations can't prove that two template engines agree, because a
template may branch on anything. So a template counts as the same only if it consists of constructs that both engines
render alike for every conversation: text, loops over messages, and comparison and concatenation of strings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import loopcontrols

from trtx.prompts.files import chat_template, has_several_templates, tokenizer_config
from trtx.text import is_encoded_by_file, load_decoder, pads_or_truncates

NO_TEMPLATE = "the model has no chat template"
_LOOP_TESTS = ("first", "last")
_UNUSUAL = re.compile(r"[^\S \t\n]|[\x00-\x08\x0e-\x1f\x7f\ufeff]")
"""White space and control characters that one of the engines trims or normalizes, such as carriage returns."""
_PLAIN_ESCAPE = re.compile(r"""\\[nt\\'"]""")
"""String escapes that both engines read alike."""
_TRIED = ("a", "a b\n c", "\N{LATIN SMALL LETTER E WITH ACUTE}1 ")


def difference(model: Path, replacing: str | None = None) -> str | None:
    """A clause that says why Dynamo's prompts may differ from transformers'; None if they can't.

    ``replacing``: the chat template that replaces the checkpoint's. Large tokenizers take a second of CPU time to read,
    so a process keeps the result for as long as the checkpoint's files stay the same.
    """
    if (identity := _identity(model)) is None:
        return _difference.__wrapped__(model, replacing, ())
    return _difference(model, replacing, identity)


def _identity(model: Path) -> tuple[tuple[str, int, int, int], ...] | None:
    """Name, inode, size and time of change of each file in ``model``; None if a file can't be looked at."""
    try:
        found = [(path.name, path.stat()) for path in model.iterdir()]
    except OSError:
        return None
    return tuple(sorted((name, stat.st_ino, stat.st_size, stat.st_ctime_ns) for name, stat in found))


@lru_cache(maxsize=64)
def _difference(model: Path, replacing: str | None, identity: tuple[tuple[str, int, int, int], ...]) -> str | None:
    if not (model / "tokenizer.json").is_file():
        return None  # without a fast tokenizer, trtx can't make the prompts either
    try:
        tokenizer, template = load_decoder(model), replacing or chat_template(model)
    except Exception:  # the process that loads the model reports the faulty file
        return None
    if template is not None and syntax_error(template) is not None:
        return None  # Dynamo refuses it, and names the line and the reason
    if template is None:
        return NO_TEMPLATE
    if not is_encoded_by_file(model):
        return "transformers does not use tokenizer.json unchanged"
    if pads_or_truncates(model):
        return "tokenizer.json defines padding or truncation"
    if any(tokenizer.encode(text).ids != tokenizer.encode(text, add_special_tokens=False).ids for text in _TRIED):
        return "the tokenizer adds special tokens, such as a begin-of-text token, and the frontend does not"
    if replacing is None and has_several_templates(model):
        return "the model has several chat templates"
    if (construct := first_foreign(template, _special_names(model))) is not None:
        return f"the chat template uses {construct}, which minijinja may render differently from Jinja"
    return None


def _special_names(model: Path) -> frozenset[str]:
    """Template variables that are special tokens as strings in both engines."""
    return frozenset(
        name for name, value in tokenizer_config(model).items() if name.endswith("_token") and isinstance(value, str)
    )


def syntax_error(template: str) -> str | None:
    """The place and the message of a syntax error that any Jinja would report, or None.

    An unknown tag is no syntax error, because transformers defines its own, such as ``generation``.
    """
    try:
        _parsed(template)
    except TemplateSyntaxError as error:
        return None if "unknown tag" in str(error) else f"line {error.lineno}: {error.message}"
    return None


def _environment() -> Environment:
    return Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False, extensions=[loopcontrols])


def _parsed(template: str) -> nodes.Template:
    return _environment().parse(template)


def first_foreign(template: str, special: frozenset[str] = frozenset()) -> str | None:
    """The first construct of ``template`` that minijinja may render differently from Jinja, or None."""
    try:
        tree = _parsed(template)
    except TemplateSyntaxError as error:
        return f"a tag that Jinja lacks (line {error.lineno}: {error.message})"
    return next(_foreign_text(template), None) or _Reader(special).first_foreign(tree.body)


def _foreign_text(template: str) -> Iterator[str]:
    """What the two lexers read differently: unusual line ends and white space, raw blocks, and string escapes."""
    if found := _UNUSUAL.search(template):
        yield f"the character {found[0]!r}"
    for line, kind, text in _environment().lex(template):
        if kind == "raw_begin":
            yield f"a raw block (line {line})"
        elif kind == "string" and "\\" in _PLAIN_ESCAPE.sub("", text):
            yield f"the string {text} (line {line})"


class _Reader:
    """Walks a template's syntax tree. ``_messages`` holds the loop variables that are messages."""

    def __init__(self, special: frozenset[str]) -> None:
        self._special = special
        self._messages: list[str] = []
        self._content_is_text = False  # set inside "if content is string"

    def first_foreign(self, body: list[nodes.Node]) -> str | None:
        return next(self._foreign(body), None)

    def _foreign(self, body: list[nodes.Node]) -> Iterator[str]:
        for node in body:
            if isinstance(node, nodes.Output):
                yield from (_named(one) for one in node.nodes if not self._prints(one))
            elif isinstance(node, nodes.If):
                if not self._is_test(node.test):
                    yield _named(node.test)
                is_text, self._content_is_text = self._content_is_text, self._is_string_test(node.test)
                yield from self._foreign(node.body)
                self._content_is_text = is_text
                yield from self._foreign([*node.elif_, *node.else_])
            elif isinstance(node, nodes.For):
                yield from self._foreign_loop(node)
            else:
                yield _named(node)

    def _foreign_loop(self, node: nodes.For) -> Iterator[str]:
        if self._is_content(node.iter):
            # Dynamo passes a list only to a template that prints no strings; for all others it joins the texts.
            yield f"a loop over the parts of a message (line {node.lineno})"
            return
        is_known = _is_name(node.iter, "messages")
        if not is_known or node.test is not None or node.recursive or not isinstance(node.target, nodes.Name):
            yield _named(node)
            return
        if node.target.name in (*self._messages, *self._special, "messages", "add_generation_prompt"):
            yield "a loop variable that hides another variable"
            return
        self._messages.append(node.target.name)
        yield from self._foreign([*node.body, *node.else_])
        self._messages.pop()

    def _prints(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.TemplateData) or self._is_string(node):
            return True
        return self._content_is_text and self._is_content(node)

    def _is_string(self, node: nodes.Node) -> bool:
        """Whether ``node`` is a string in both engines, or an error in both."""
        if isinstance(node, nodes.Const):
            return isinstance(node.value, str)
        if isinstance(node, nodes.Name):
            return node.name in self._special
        if isinstance(node, nodes.Add):
            left, right = (self._is_string(one) or self._is_content(one) for one in (node.left, node.right))
            return left and right and not (self._is_content(node.left) and self._is_content(node.right))
        return self._is_field(node, "role")

    def _is_content(self, node: nodes.Node) -> bool:
        """Whether ``node`` is a message's content: a string, which both engines print alike, or a list or None."""
        return self._is_field(node, "content")

    def _is_field(self, node: nodes.Node, field: str) -> bool:
        if isinstance(node, nodes.Getattr):
            return _is_name(node.node, *self._messages) and node.attr == field
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            return _is_name(node.node, *self._messages) and node.arg.value == field
        return False

    def _is_string_test(self, node: nodes.Node) -> bool:
        return isinstance(node, nodes.Test) and node.name == "string" and self._is_content(node.node)

    def _is_test(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.And | nodes.Or):
            return self._is_test(node.left) and self._is_test(node.right)
        if isinstance(node, nodes.Not):
            return self._is_test(node.node)
        if isinstance(node, nodes.Compare):
            sides = [node.expr, *(operand.expr for operand in node.ops)]
            return len(sides) == 2 and node.ops[0].op in ("eq", "ne") and all(map(self._is_string, sides))
        if self._is_string_test(node):
            return True
        if isinstance(node, nodes.Getattr):
            return _is_name(node.node, "loop") and node.attr in _LOOP_TESTS
        return _is_name(node, "add_generation_prompt")


def _is_name(node: nodes.Node, *names: str) -> bool:
    return isinstance(node, nodes.Name) and node.name in names


def _named(node: nodes.Node) -> str:
    if isinstance(node, nodes.Getattr):
        name = f"the attribute {node.attr}"
    elif isinstance(node, nodes.Filter | nodes.Test | nodes.Name):
        name = f"the {type(node).__name__.lower()} {node.name}"
    else:
        name = f"a block or expression of the kind {type(node).__name__}"
    return f"{name} (line {node.lineno})"
