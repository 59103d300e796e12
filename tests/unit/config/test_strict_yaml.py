"""The one reader of YAML: what it takes, and what it refuses with which words. Odd text: tests/unit/fuzz."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from source_trees import FILES, ROOT, nodes_of

from trtx.config import load_engine_config
from trtx.config.strict_yaml import MAX_VALUES, parse_yaml, read_yaml
from trtx.errors import UsageError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# only a comment", None),
        ("a: 1\nb: [x, 1.5, true, null, '2001-01-01']", {"a": 1, "b": ["x", 1.5, True, None, "2001-01-01"]}),
        ("{1: 4, 8: 2}", {1: 4, 8: 2}),
        ("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}", {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}),
        ("a: &a {x: 1}\nb: {<<: *a, x: 2}", {"a": {"x": 1}, "b": {"x": 2}}),
        ("a: &a {x: 1}\nb: &b {x: 2, y: 2}\nc: {<<: [*a, *b]}",
         {"a": {"x": 1}, "b": {"x": 2, "y": 2}, "c": {"x": 1, "y": 2}}),
        ("a: !!str 1", {"a": "1"}),
        ("a: 0x10", {"a": 16}),
        ("a: 18446744073709551615", {"a": 2**64 - 1}),
    ],
)  # fmt: skip
def test_plain_values_are_read(text: str, value: object) -> None:
    assert parse_yaml(text, "x") == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3", ["line 3", "'a' occurs twice", "first in line 1"]),
        ("a: {b: 1, b: 1}", ["line 1", "'b' occurs twice"]),
        ("a: &a {x: 1}\nb: {<<: *a, <<: *a}", ["line 2", "<< occurs twice"]),
        ("a: &a [*a]", ["line 1", "*a is used inside the value that it names"]),
        ("a: *b", ["*b names no anchor"]),
        ("a: &b 1\nc: &b 2", ["line 2", "&b is set twice"]),
        ("a: 2001-99-99", ["'2001-99-99' reads as a date", "quotes"]),
        ("a: 12:30", ["'12:30'", "base 8 or 60"]),
        ("a: 010", ["'010'", "base 8 or 60"]),
        ("a: .nan", [".nan is not a finite number"]),
        ("a: 1.0e+999", ["not a finite number"]),
        ("a: 18446744073709551616", ["beyond 64 bits"]),
        ("a: " + "9" * 5000, ["5,000 characters"]),
        ("on: 1", ["the key True is a boolean", "quote it"]),
        ("? [a]\n: 1", ["the key ['a'] is a list"]),
        ("a: 1\n---\nb: 2", ["line 2", "a second document"]),
        ("a: !!python/object:os.system x", ["the tag", "python/object:os.system"]),
        ("a: !!null x", ["the tag !!null"]),
        ("a: [1", ["line 1", "this is not YAML"]),
        ("a: \0", ["character that no YAML may hold"]),
    ],
)
def test_what_could_be_read_as_something_else_is_refused_with_its_line(text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as refused:
        parse_yaml(text, "engine config odd.yaml")
    for word in ("engine config odd.yaml, line ", *words):
        assert word in str(refused.value)


PIECES = [
    "a", "b: ", "c:", "- ", "-", "\n", "\n  ", "\n    ", "\n- ", " ", "  ", "#x", " # c", "'", '"', "\\", "\\x41",
    "\\ud800", "[", "]", "{", "}", ", ", ",", ": ", ":", "&a ", "*a", "<<: ", "%YAML 1.1\n", "\n---\n", "\n...\n", "1",
    "0x1", "1.5", "~", "null", "true", "@", "`", "a:b", "http://x", "''", '"q\\\n  r"', "key: value\n", "- x\n",
    "k:\n  v: 1\n", "a: &a {x: 1}\n", "\t", "!x ", "|2#x", ">\n", "?", "\ufeff", "\x85", "\0",
]  # fmt: skip


def value_or_none(text: str) -> str | None:
    try:
        return repr(parse_yaml(text, "x"))
    except UsageError:
        return None


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map("".join))
@example("a: \tb")
@example("{a?}")
@example("a: |#x\n  b")
@example("\n\ufeffa: 1")
def test_libyaml_reads_what_pyyaml_reads(text: str) -> None:
    """PyYAML's own parser, which is slow, has the say; a comment with a tag in it leaves a text to that."""
    assert value_or_none(f"{text}\n") == value_or_none(f"{text}\n#!")


def test_what_is_no_file_is_refused_without_a_line() -> None:
    with pytest.raises(UsageError, match=r"^--set 'a=\{x: 1, x: 2\}': 'x' occurs twice in one mapping; keep one$"):
        parse_yaml("{x: 1, x: 2}", "--set 'a={x: 1, x: 2}'", is_file=False)


def test_aliases_count_as_often_as_they_are_used() -> None:
    thousand = f"a: &a [{', '.join(['1'] * 1000)}]\n"
    assert len(parse_yaml(thousand + f"b: [{', '.join(['*a'] * 50)}]", "x")["b"]) == 50
    with pytest.raises(UsageError, match=f"more than {MAX_VALUES:,} values"):
        parse_yaml(thousand + f"b: [{', '.join(['*a'] * 120)}]", "x")


def test_a_value_that_two_places_share_is_changed_in_one(tmp_path: Path) -> None:
    file = tmp_path / "agg.yaml"
    file.write_text("kv_cache_config: &kv {dtype: auto}\nsleep_config: *kv\n")
    config = load_engine_config(
        "agg", family="", path=file, overrides=("kv_cache_config.dtype=fp8",), engine="tensorrt-llm"
    )
    assert config.values == {"kv_cache_config": {"dtype": "fp8"}, "sleep_config": {"dtype": "auto"}}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.mkdir(), "is a directory"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device"),
        (lambda path: path.symlink_to(path), "can't be read"),
        (lambda path: path.write_bytes(b"a: 1\n\xff"), "line 2 is not UTF-8"),
        (lambda path: path.write_bytes(b"a: 1\n" * 60_000), "larger than 256 KiB"),
        (lambda path: None, "No such file"),
    ],
)
def test_a_file_that_no_config_is_is_refused(tmp_path: Path, make: Any, words: str) -> None:
    make(tmp_path / "odd.yaml")
    with pytest.raises(UsageError) as refused:
        read_yaml(tmp_path / "odd.yaml", "sweep file", "a YAML file")
    for word in ("sweep file ", "odd.yaml", "expected a YAML file", words):
        assert word in str(refused.value)


def test_nothing_else_reads_yaml() -> None:
    readers = set()
    for path in FILES:
        for node in nodes_of(path) if "yaml" in path.read_text(encoding="utf-8") else ():
            is_yaml = isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "yaml"
            if is_yaml and re.search("load|parse|compose|scan", node.attr):
                readers.add(str(path.relative_to(ROOT)))
    # lm-eval's own files have tags that are Python's: only their keys are looked at, by node.
    lm_eval = {"evals/session/local_files.py"}
    assert readers - lm_eval == {"config/strict_yaml.py"}, "read YAML with trtx.config.strict_yaml.read_yaml"
