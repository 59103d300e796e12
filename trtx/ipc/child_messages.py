"""Messages that both the engine process and the encoder process use, as msgspec structs. No logic here."""

from __future__ import annotations

import msgspec


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", array_like=True):
    """Message to the process: it must end."""


class Progress(msgspec.Struct, frozen=True, tag="progress", array_like=True):
    """Message from the process: a line for the log of its parent."""

    text: str


class Fatal(msgspec.Struct, frozen=True, tag="fatal", array_like=True):
    """The last message from the process, which says why it ends."""

    text: str
    is_usage: bool = False  # the caller's arguments are wrong, and text is meant for a person
