"""The contents of an ``input_file``, and how they are counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtx.bench.answer_formats import requested_format
from trtx.bench.datasets.values import body_of, numbers_of
from trtx.config.wording import counted


def _second(pair: tuple[str, float]) -> float:
    return pair[1]


@dataclass(slots=True)
class RecordTally:
    """Counts what the records of a file contain."""

    records: int = 0
    requests: int = 0
    skipped: int = 0
    shortest: int | None = None
    longest: int | None = None
    known: int = 0
    unsent: dict[str, None] = field(default_factory=dict)
    with_format: int = 0
    with_tools: int = 0
    guided: str = ""
    most: tuple[str, int] = ("", 0)
    numbers: dict[str, tuple[tuple[str, float], tuple[str, float]]] = field(default_factory=dict)

    def add(self, where: str, turns: list[Any], answers: int) -> None:
        self.records += 1
        self.requests += answers or len(turns)
        for turn in turns:
            if (requested := requested_format(body_of(turn))) is not None:
                self.with_format += "format" in requested.asked
                self.with_tools += "tools" in requested.asked
                self.guided = self.guided or (where if requested.needs_guidance else "")
            tokens = (getattr(turn, "input_length", None) or 0) + (turn.output_length or 0)
            if tokens > self.most[1]:
                self.most = (where, tokens)
            for name, number in numbers_of(turn):
                low, high = self.numbers.get(name, ((where, number), (where, number)))
                self.numbers[name] = (min(low, (where, number), key=_second), max(high, (where, number), key=_second))
            if isinstance(length := turn.output_length, int):
                self.known += 1
                self.shortest = length if self.shortest is None else min(self.shortest, length)
                self.longest = length if self.longest is None else max(self.longest, length)

    def lengths(self) -> str:
        """The output lengths that requests state, as a clause; – if they state none."""
        if not self.known:
            return "–"
        spread = f"{self.shortest} to {self.longest}" if self.shortest != self.longest else f"{self.shortest}"
        return (
            spread if self.known == self.requests else f"{spread} of {counted(self.known, 'request')}, – for the others"
        )

    def notes(self) -> list[str]:
        """Further facts about the records for ``--dry-run``, one clause each."""
        found = []
        if self.with_format:
            found.append(f"with a format of the answer: {counted(self.with_format, 'request')}")
        if self.with_tools:
            found.append(f"with tools: {counted(self.with_tools, 'request')}")
        if self.skipped:
            found.append(f"left out because they contain no answered question: {counted(self.skipped, 'record')}")
        if self.unsent:
            found.append(f"not sent because the load sets them: {', '.join(self.unsent)}")
        return found


@dataclass(frozen=True, slots=True)
class Dataset:
    """The form and contents of an ``input_file``.

    ``form``: the form's name. ``sent_as``: aiperf's name for the form that aiperf reads; None: aiperf recognises it
    itself. ``is_copied``: aiperf reads a copy, made by :func:`write_records`. ``records``: None if only aiperf can read
    the records. ``most``: the record that states the most tokens of prompt and answer, and that number. ``numbers``:
    for each numeric field of the request body, record, name and value of its minimum and of its maximum.
    """

    path: Path
    form: str
    sent_as: str | None
    is_copied: bool = False
    records: int | None = None
    requests: int = 0
    lengths: str = ""
    notes: tuple[str, ...] = ()
    has_all_lengths: bool = False  # every request states its output length
    most: tuple[str, int] = ("", 0)
    numbers: tuple[tuple[str, str, float], ...] = ()
    guided: str = ""  # the first record that needs guided decoding
    asks_formats: bool = True  # a request may ask for structured output or offer tools

    @property
    def description(self) -> str:
        """A one-line description for ``--dry-run``."""
        form = self.form if self.sent_as in (None, self.form) else f"{self.form}, sent as {self.sent_as}"
        if self.records is None:
            return f"{form}; records and lengths are read by aiperf"
        counts = f"{counted(self.records, 'record')}, {counted(self.requests, 'request')}"
        return "; ".join([f"{form}: {counts}", f"output lengths: {self.lengths}", *self.notes])
