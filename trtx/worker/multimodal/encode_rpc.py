"""What a worker and an encode worker say to each other of one picture, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from trtx.engine.api import EmbeddingHandle, EmbeddingMismatch, SharedTensor, parse_handle
from trtx.media import Kind, MediaError
from trtx.worker.multimodal.encode_contract import Contract

CONTRACT = Contract("trtx-pictures", 2)
"""1 had no name and no counts: asked for one, it answered that the picture is too large."""


def question(picture: SharedTensor, key: bytes, kind: Kind, most_rows: int, *, in_file: bool = False) -> dict[str, Any]:
    """``picture``: uint8, the bytes of its file. What a client calls it stays here: others may ask for the same one.
    ``in_file``: whoever asks can't read an embedding on the encoder's device."""
    asked = {"picture": msgspec.to_builtins(picture), "key": key.hex(), "kind": kind, "most_rows": most_rows}
    return CONTRACT.marked({**asked, "in_file": True} if in_file else asked)


def count_question(picture: SharedTensor, key: bytes, kind: Kind) -> dict[str, Any]:
    """How many rows its embedding will have, before anything is encoded."""
    return {**question(picture, key, kind, 0), "count": True}


def wants_count(asked: Any) -> bool:
    """Of a question that :func:`read_question` took."""
    return asked.get("count") is True


def wants_file(asked: Any) -> bool:
    """Of a question that :func:`read_question` took."""
    return asked.get("in_file") is True


def read_question(asked: Any) -> tuple[SharedTensor, bytes, Kind, int]:
    """Raises ValueError for what is no question, OtherRelease for one of another contract."""
    if not isinstance(asked, Mapping):
        raise ValueError("expected picture, key, kind and most_rows")
    CONTRACT.unmarked(asked)
    try:
        kind: Kind = msgspec.convert(asked.get("kind"), Kind)
        most_rows = msgspec.convert(asked.get("most_rows"), int)
        return (
            msgspec.convert(asked.get("picture"), SharedTensor),
            bytes.fromhex(str(asked.get("key"))),
            kind,
            most_rows,
        )
    except (msgspec.ValidationError, ValueError) as error:
        raise ValueError(f"expected picture, key, kind and most_rows: {error}") from error


def refusal(error: MediaError) -> dict[str, Any]:
    """A fault of the picture's own: another encode worker would find it too. About THIS_PICTURE."""
    return CONTRACT.marked({"error": str(error), "status": error.status})


def is_refusal(answered: Mapping[str, Any]) -> bool:
    return "error" in answered


def answer(handle: EmbeddingHandle) -> dict[str, Any]:
    """To :func:`question`."""
    return CONTRACT.marked(handle.to_dict())


def read_answer(answered: Mapping[str, Any], key: bytes) -> EmbeddingHandle:
    """Raises MediaError about THIS_PICTURE, EmbeddingMismatch for what is no answer about ``key``, OtherRelease."""
    CONTRACT.unmarked(answered)
    if is_refusal(answered):
        raise MediaError(answered["status"], answered["error"])
    handle = parse_handle(answered)
    if handle.key != key:
        raise EmbeddingMismatch("an encode worker answered with another picture's embedding")
    return handle


def count(rows: int | None) -> dict[str, Any]:
    """The answer to :func:`count_question`."""
    return CONTRACT.marked({"rows": rows})


def read_count(answered: Mapping[str, Any]) -> int | None:
    """Raises MediaError about THIS_PICTURE, OtherRelease."""
    CONTRACT.unmarked(answered)
    if is_refusal(answered):
        raise MediaError(answered["status"], answered["error"])
    return msgspec.convert(answered.get("rows"), int | None)
