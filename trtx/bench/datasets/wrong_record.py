"""The error of a record that can't be sent as it is."""

from __future__ import annotations


class WrongRecord(Exception):
    """A record is invalid. The message continues a sentence that begins with file and line.

    ``field``: the unknown field, if that is the problem; ``known`` are then the valid fields.
    """

    def __init__(self, problem: str, field: str | None = None, known: frozenset[str] = frozenset()) -> None:
        super().__init__(problem)
        self.field, self.known = field, known
