"""Media in the engine's process: stored embeddings, validation of placeholder ranges, media in block names.

A sequence holds its prompt's embeddings from arrival until the prompt is computed, and again after a preemption. So a
dropped key is gone for later sequences only, and its memory is freed once no sequence uses it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from trtx.torch_engine.messages import MEDIA_KEY_BYTES, MediaSpan
from trtx.torch_engine.step import EmbeddingRows, StepEmbedding

MAX_ROUTING_ID = 2**32 - 1
"""Router ids are unsigned 32-bit numbers."""
MAX_TIME_STEP = 1e6
"""Upper limit of the positions that one time step of a video takes: larger than any context."""


@dataclass(frozen=True, slots=True)
class EmbeddingShortage:
    """The reason why the rest of a prompt can't be computed for lack of a usable embedding.

    ``missing``: keys that were never put, or were dropped. ``is_failure``: the request did not cause it.
    """

    text: str
    missing: tuple[bytes, ...] = ()
    is_failure: bool = False


class MediaStore:
    """Maps keys to embeddings. The caller's side decides what is stored, and how much."""

    def __init__(self) -> None:
        self._known: dict[bytes, StepEmbedding | Exception] = {}

    def put(self, key: bytes, embedding: StepEmbedding | Exception) -> None:
        """Stores an embedding, or the exception that fails the requests that need it.

        A ValueError means that the model can't use the embedding; any other exception means that the engine could not
        read it. A stored embedding is never replaced, since equal keys mean equal contents.
        """
        if not isinstance(self._known.get(key), StepEmbedding):
            self._known[key] = embedding

    def drop(self, keys: Iterable[bytes]) -> None:
        """Removes embeddings. Unknown keys are ignored."""
        for key in keys:
            self._known.pop(key, None)

    def __len__(self) -> int:
        return len(self._known)

    def hold(self, spans: Sequence[MediaSpan], held: list[StepEmbedding | None]) -> list[StepEmbedding | None]:
        """Returns ``held`` (one entry for each range) with missing embeddings filled in as far as they are stored."""
        found: list[StepEmbedding | None] = []
        for span, one in zip(spans, held, strict=True):
            known = self._known.get(span.key) if one is None else one
            found.append(known if isinstance(known, StepEmbedding) else None)
        return found

    def shortage(
        self, spans: Sequence[MediaSpan], held: Sequence[StepEmbedding | None], num_computed: int
    ) -> EmbeddingShortage | None:
        """Returns why a prompt can't be computed from position ``num_computed`` on, or None if it can."""
        missing: list[bytes] = []
        for span, embedding in zip(spans, held, strict=True):
            if span.start + span.length <= num_computed:
                continue
            if embedding is None:
                known = self._known.get(span.key)
                if isinstance(known, Exception):
                    text = f"the embedding of the media at token {span.start} can't be used: {known}"
                    return EmbeddingShortage(text, is_failure=not isinstance(known, ValueError))
                missing.append(span.key)
            elif embedding.rows != (span.rows or span.length):
                return EmbeddingShortage(
                    f"the embedding of the media at token {span.start} has {embedding.rows} rows; expected "
                    f"{span.rows or span.length}, as many as the prompt has placeholders for it"
                )
        if not missing:
            return None
        return EmbeddingShortage(
            f"the engine has neither embedding nor KV for {len(missing)} of the prompt's {len(spans)} media items; "
            "send their embeddings and submit the request again",
            tuple(dict.fromkeys(missing)),
            is_failure=True,
        )


def media_problem(
    spans: Sequence[MediaSpan], routing_token_ids: Sequence[int] | None, length: int, *, needs_grids: bool
) -> str | None:
    """Returns what is wrong with the media ranges or routing ids of a prompt of ``length`` tokens, or None."""
    if routing_token_ids is not None:
        if len(routing_token_ids) != length:
            return f"routing_token_ids has {len(routing_token_ids)} ids; expected {length}, one for each prompt token"
        if length and not (min(routing_token_ids) >= 0 and max(routing_token_ids) <= MAX_ROUTING_ID):
            return f"routing_token_ids contain an invalid id; expected 0 to {MAX_ROUTING_ID}"
    before = 0
    for index, span in enumerate(spans):
        if len(span.key) != MEDIA_KEY_BYTES:
            return f"media {index} has a key of {len(span.key)} bytes; expected {MEDIA_KEY_BYTES}"
        if span.length < 1 or span.start < before or span.start + span.length > length:
            return (
                f"media {index} covers tokens {span.start} to {span.start + span.length} of {length}; expected at "
                f"least one token, from {before} on, because media ranges must not overlap"
            )
        if span.grid is not None and (min(span.grid) < 1 or prod(span.grid) != span.length):
            return (
                f"media {index} has a grid of {' x '.join(map(str, span.grid))} and {span.length} tokens; expected as "
                "many tokens as the grid has rows"
            )
        if span.first < 0 or (span.rows or span.length) < span.first + span.length:
            return (
                f"media {index} uses rows {span.first} to {span.first + span.length} of "
                f"{span.rows or span.length}; expected a part of its embedding"
            )
        if not 0 < span.time_step <= MAX_TIME_STEP:
            return f"media {index} has a time_step of {span.time_step}; expected one above 0, up to {MAX_TIME_STEP}"
        if needs_grids and span.grid is None:
            return f"media {index} has no grid; expected (t, h, w) in rows, as this model's positions depend on it"
        before = span.start + span.length
    return None


def _first_after(spans: Sequence[MediaSpan], position: int) -> int:
    """Index of the first placeholder range that ends after ``position``."""
    return bisect_right(spans, position, key=lambda span: span.start + span.length)


def rows_between(
    spans: Sequence[MediaSpan], embeddings: Sequence[StepEmbedding | None], start: int, end: int
) -> tuple[EmbeddingRows, ...]:
    """Embedding rows that replace the token embeddings in positions ``[start, end)``.

    Offsets are relative to ``start``.
    """
    found: list[EmbeddingRows] = []
    for index in range(_first_after(spans, start), len(spans)):
        span, embedding = spans[index], embeddings[index]
        if span.start >= end:
            break
        assert embedding is not None, "see Scheduler._admit"
        first, last = max(start, span.start), min(end, span.start + span.length)
        found.append(EmbeddingRows(first - start, embedding, span.first + first - span.start, last - first))
    return tuple(found)


def media_identity(spans: Sequence[MediaSpan], start: int, end: int) -> bytes:
    """Cache-key bytes for the media rows inside positions ``[start, end)``; b"" if there are none.

    They hold each range's offset, its rows, its grid, its time step and its key.
    """
    found = bytearray()
    for index in range(_first_after(spans, start), len(spans)):
        span = spans[index]
        if span.start >= end:
            break
        first, last = max(start, span.start), min(end, span.start + span.length)
        numbers = (first - start, span.first + first - span.start, last - first, *(span.grid or (0, 0, 0)))
        found += array("i", numbers).tobytes() + array("d", (span.time_step,)).tobytes() + span.key
    return bytes(found)
