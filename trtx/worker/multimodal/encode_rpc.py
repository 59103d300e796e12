"""Messages between a worker and an encode worker about one image, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from trtx.engine.api import EmbeddingHandle, EmbeddingMismatch, SharedTensor, parse_handle
from trtx.media import Kind, MediaError
from trtx.worker.multimodal.encode_contract import Contract

CONTRACT = Contract("trtx-pictures", 2)
"""Version 1 had no contract name and no row counts: it answered a count request with "too large"."""


def question(picture: SharedTensor, key: bytes, kind: Kind, most_rows: int, *, in_file: bool = False) -> dict[str, Any]:
    """A request to encode an image. ``picture`` is a uint8 tensor with the bytes of its file.

    The client's label for the image is not sent, because other requests may share the image under other labels.
    ``in_file``: the requester can't read an embedding on the encoder's device.
    """
    asked = {"picture": msgspec.to_builtins(picture), "key": key.hex(), "kind": kind, "most_rows": most_rows}
    return CONTRACT.marked({**asked, "in_file": True} if in_file else asked)


def count_question(picture: SharedTensor, key: bytes, kind: Kind) -> dict[str, Any]:
    """A request for the number of rows that the image's embedding will have; nothing is encoded for it."""
    return {**question(picture, key, kind, 0), "count": True}


def wants_count(asked: Any) -> bool:
    """Whether the message asks for a row count. ``asked`` must be valid for :func:`read_question`."""
    return asked.get("count") is True


def wants_file(asked: Any) -> bool:
    """Whether the requester needs the embedding in a file. ``asked`` must be valid for :func:`read_question`."""
    return asked.get("in_file") is True


def read_question(asked: Any) -> tuple[SharedTensor, bytes, Kind, int]:
    """Raises ValueError for a malformed message, OtherRelease for a protocol mismatch."""
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
    """The answer for a faulty image, which every encode worker would refuse. Its message is about THIS_PICTURE."""
    return CONTRACT.marked({"error": str(error), "status": error.status})


def is_refusal(answered: Mapping[str, Any]) -> bool:
    return "error" in answered


def answer(handle: EmbeddingHandle) -> dict[str, Any]:
    """An encode worker's answer to :func:`question`: the embedding's handle as a JSON object."""
    return CONTRACT.marked(handle.to_dict())


def read_answer(answered: Mapping[str, Any], key: bytes) -> EmbeddingHandle:
    """The embedding's handle.

    Raises MediaError about THIS_PICTURE for a refusal, EmbeddingMismatch for a malformed handle or one for another
    ``key``, OtherRelease for a protocol mismatch.
    """
    CONTRACT.unmarked(answered)
    if is_refusal(answered):
        raise MediaError(answered["status"], answered["error"])
    handle = parse_handle(answered)
    if handle.key != key:
        raise EmbeddingMismatch("an encode worker answered with another image's embedding")
    return handle


def count(rows: int | None) -> dict[str, Any]:
    """An encode worker's answer to :func:`count_question`: how many rows the embedding would have."""
    return CONTRACT.marked({"rows": rows})


def read_count(answered: Mapping[str, Any]) -> int | None:
    """The row count, or None if unknown. Raises MediaError about THIS_PICTURE for a refusal, OtherRelease."""
    CONTRACT.unmarked(answered)
    if is_refusal(answered):
        raise MediaError(answered["status"], answered["error"])
    return msgspec.convert(answered.get("rows"), int | None)
