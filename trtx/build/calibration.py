"""Calibration text, which the quantizer runs through the model to measure the ranges of its activations."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtx.checkpoint.tasks import TASKS, samples
from trtx.checkpoint.text import sentences
from trtx.config.files import open_file, reason
from trtx.config.strict_json import parse_json
from trtx.config.wording import a_kind, shown
from trtx.errors import UsageError

MAX_TOKENS = 512
"""The maximum length of one text, as in ModelOpt's own examples (llm_ptq, calib_seq); longer texts are truncated."""

_EXPECTED = 'expected a JSON object with "text", "prompt" or "messages", such as {"text": "Once upon a time"}'
_SEED = 2_000_003  # neither the training text nor the held-out text uses this seed
_LONGEST_LINE = 16 << 20  # bytes; only MAX_TOKENS tokens of a line are used
_SENTENCES = 12  # per text, about 250 tokens

# A text, or a conversation, which the model's own chat template renders.
Entry = str | list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Calibration:
    """The calibration entries. ``source``: the file's name, or the name of the built-in set."""

    source: str
    entries: tuple[Entry, ...]

    @property
    def digest(self) -> str:
        """The SHA-256 of the entries. The same text gives the same build, whatever the file's name."""
        return hashlib.sha256(json.dumps(self.entries, ensure_ascii=False).encode()).hexdigest()


def built_in(size: int) -> Calibration:
    """Returns ``size`` generated entries: prose and short conversations, disjoint from the text of the proof."""
    prose = sentences(_SEED, 10**9)
    tasks = {task: samples(task, "train", _SEED) for task in TASKS}
    names = itertools.cycle(TASKS)
    entries: list[Entry] = []
    while len(entries) < size:
        entries.append("".join(itertools.islice(prose, _SENTENCES)))
        sample = next(tasks[next(names)])
        entries.append([{"role": "user", "content": sample.prompt}, {"role": "assistant", "content": sample.answer}])
    return Calibration("built-in", tuple(entries[:size]))


def read_calibration(path: Path, size: int, what: str = "calibration file") -> Calibration:
    """Reads the first ``size`` entries of a JSONL file, or all if it has fewer.

    ``what``: the kind of file, for messages. Raises UsageError, which names the line.
    """
    entries: list[Entry] = []
    expected = f"{_EXPECTED.removeprefix('expected ')}, on each line"
    try:
        with open_file(path, what, expected) as file:
            lines = iter(lambda: file.readline(_LONGEST_LINE), b"")
            for number, line in enumerate(lines, start=1):
                where = f"{what} {shown(path)}, line {number}"
                if len(line) == _LONGEST_LINE:
                    raise UsageError(f"{where} is longer than {_LONGEST_LINE >> 20} MiB; {_EXPECTED}")
                if line.strip():
                    entries.append(_entry(line, where))
                if len(entries) == size:
                    break
    except OSError as error:
        raise UsageError(f"{what} {shown(path)} can't be read ({reason(error)}); {_EXPECTED} on each line") from error
    if not entries:
        raise UsageError(f"{what} {shown(path)} is empty; {_EXPECTED} on each line")
    return Calibration(path.name, tuple(entries))


def _entry(line: bytes, where: str) -> Entry:
    try:
        row = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not text (byte {error.start} is no UTF-8); {_EXPECTED}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON ({shown(error)}); {_EXPECTED}") from error
    if not isinstance(row, dict):
        raise UsageError(f"{where} holds {a_kind(row)}; {_EXPECTED}")
    if "messages" in row:
        return _conversation(row["messages"], where)
    text = row.get("text", row.get("prompt"))
    if text is None:
        raise UsageError(f"{where} has the fields {shown(', '.join(row)) or '(none)'}; {_EXPECTED}")
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"{where} has {json.dumps(text)[:40]} as its text; expected text that is not empty")
    return text


def _conversation(messages: Any, where: str) -> Entry:
    expected = 'expected "messages" to be a list of {"role": "user", "content": "text"}'
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"{where}: messages is {json.dumps(messages)[:40]}; {expected}")
    for message in messages:
        fields = message if isinstance(message, dict) else {}
        if not all(isinstance(fields.get(key), str) and fields[key] for key in ("role", "content")):
            raise UsageError(f"{where}: messages has {json.dumps(message)[:60]}; {expected}")
    return [{"role": message["role"], "content": message["content"]} for message in messages]
