"""Calibration text: what a file may hold, what each error says, and that nothing of it is held out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trtx.build.calibration import built_in, read_calibration
from trtx.build.proof import TEXTS
from trtx.checkpoint.held_out import SENTENCES_PER_TEXT, held_out_texts
from trtx.checkpoint.tasks import TASKS, samples
from trtx.errors import UsageError

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def lines(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n", "utf-8")
    return path


def test_text_prompts_and_conversations_are_read_in_order_up_to_the_size(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "c.jsonl",
        {"text": "one\N{LINE SEPARATOR}line"},
        "",
        {"prompt": "two", "other": 1},
        {"messages": TURNS},
        "not read",
    )
    read = read_calibration(file, 3)
    assert read.entries == ("one\N{LINE SEPARATOR}line", "two", TURNS)
    assert read.source == "c.jsonl"


def test_the_digest_is_of_the_text_and_not_of_its_name(tmp_path: Path) -> None:
    first = read_calibration(lines(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two"}), 9)
    same = read_calibration(lines(tmp_path / "b.jsonl", {"prompt": "one"}, {"text": "two"}, {"text": "three"}), 2)
    other = read_calibration(lines(tmp_path / "c.jsonl", {"text": "one"}, {"text": "three"}), 9)
    assert first.digest == same.digest != other.digest


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ("is empty",)),
        (b"\n\n  \n", ("is empty",)),
        (b'{"text": "fine"}\n\xff\xfe\x00', ("line 2", "is not text", "byte 0")),
        (b'{"text": "fine"}\nplain words\n', ("line 2", "is not JSON")),
        (b'["text"]', ("line 1", "holds a list")),
        (b'{"text": "one", "text": "other"}', ("line 1", "'text' occurs twice in one object")),
        (b'{"body": "x", "id": 1}', ("line 1", "body, id", '"text", "prompt" or "messages"')),
        (b'{"text": ""}', ("line 1", "not empty")),
        (b'{"text": 17}', ("line 1", "17")),
        (b'{"messages": []}', ("line 1", "messages is []")),
        (b'{"messages": [{"role": "user"}]}', ("line 1", '"content": "text"')),
        (b'{"messages": ["Hi"]}', ("line 1", '"Hi"')),
    ],
)
def test_each_error_names_the_file_the_line_and_what_was_expected(
    tmp_path: Path, content: bytes, words: tuple[str, ...]
) -> None:
    file = tmp_path / "calibration.jsonl"
    file.write_bytes(content)
    with pytest.raises(UsageError) as refused:
        read_calibration(file, 8)
    for word in ("calibration.jsonl", "expected", *words):
        assert word in str(refused.value)


@pytest.mark.parametrize("name", ["no-such-file.jsonl", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="can't be read"):
        read_calibration(tmp_path / name, 8)


def test_the_built_in_set_is_the_same_each_time_and_shares_nothing_with_the_held_out_text() -> None:
    entries = built_in(256).entries
    assert len(entries) == 256
    assert built_in(128).entries == entries[:128]
    held_out = {sentence for sentence in held_out_texts(TEXTS * SENTENCES_PER_TEXT) if len(sentence) > 20}
    prose = "".join(entry for entry in entries if isinstance(entry, str))
    assert not any(sentence in prose for sentence in held_out)
    questions = {entry[0]["content"] for entry in entries if not isinstance(entry, str)}
    asked = {
        sample.prompt for task in TASKS for sample, _ in zip(samples(task, "held-out", 0), range(64), strict=False)
    }
    assert len(questions) > 64
    assert not questions & asked
