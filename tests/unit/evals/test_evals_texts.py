"""A person's own text as documents, and every fault of its file as one sentence with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtx.errors import UsageError
from trtx.evals.texts import read_texts


def written(directory: Path, name: str, content: bytes | str) -> Path:
    path = directory / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_text_is_read_by_paragraphs_each_with_its_line(tmp_path: Path) -> None:
    text = "\n\nOne line\nand another.\n \n\t\n  Indented, [1, 2].\r\n\r\nLast"
    found = read_texts(written(tmp_path, "a.txt", b"\xef\xbb\xbf" + text.encode()))
    assert [(one["line"], one["text"]) for one in found] == [
        (3, "One line\nand another."), (7, "Indented, [1, 2]."), (9, "Last"),
    ]  # fmt: skip


def test_of_json_lines_each_is_one_document_as_it_is(tmp_path: Path) -> None:
    lines = '{"text": " a\\n\\nb ", "id": 1}\n\n{"text": "c"}\r\n'
    found = read_texts(written(tmp_path, "a.JSONL", lines))
    assert found == [{"text": " a\n\nb ", "line": 1}, {"text": "c", "line": 3}]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "", ["is empty"]),
        ("a.txt", " \n\n\t", ["is empty"]),
        ("a.jsonl", "\n", ["is empty"]),
        ("a.txt", b"one\ntwo\n\xff\xfe", ["line 3 is not UTF-8"]),
        ("a.txt", b"one\n\x00\x01", ["line 2 holds a NUL byte", "not text"]),
        ("a.jsonl", '{"text": "a"}\nb\n', ["line 2 can't be read as JSON"]),
        ("a.jsonl", '{"text": "a"}\n["b"]\n', ["line 2 holds a list"]),
        ("a.jsonl", "5", ["line 1 holds a whole number"]),
        ("a.jsonl", '{"text": "a"}\n{"text": "b", "text": "c"}\n', ["line 2 can't", "'text' occurs twice"]),
        ("a.jsonl", '{"text": "a"}\n\n{"body": "b"}\n', ["line 3 has the fields body"]),
        ("a.jsonl", "{}", ["line 1 has the fields (none)"]),
        ("a.jsonl", '{"text": "  "}', ["line 1 has", "not empty"]),
        ("a.jsonl", '{"text": 5}', ["line 1 has 5 as its text"]),
        ("a.jsonl", '{"text": "a\\ud800"}', ["line 1 has half a character"]),
    ],
)
def test_what_is_wrong_with_a_text_is_one_sentence(
    tmp_path: Path, name: str, content: bytes | str, words: list[str]
) -> None:
    with pytest.raises(UsageError) as refused:
        read_texts(written(tmp_path, name, content))
    said = str(refused.value)
    assert said.startswith("--text ") and "\n" not in said and "expected" in said
    assert all(word in said for word in words), said


def test_a_file_that_is_not_there_or_is_none_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(UsageError, match=r"^--text .*expected text as UTF-8"):
            read_texts(path)
