"""The pictures of a request, as Dynamo sends them, and their places in its prompt.

The frontend leaves one placeholder a picture in the prompt, in their order; how many positions each takes is known only
once its embedding is, so the worker makes room for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtx.engine.api import MediaSpan
from trtx.worker.request import InvalidRequest

_IMAGES = "image_url"


@dataclass(frozen=True, slots=True)
class Picture:
    """What an embedding of one picture takes of a prompt. ``rows`` positions; ``grid``: (t, h, w) in merged patches."""

    key: bytes
    rows: int
    grid: tuple[int, int, int] | None = None


def picture_urls(wire: Mapping[str, Any]) -> tuple[str, ...]:
    """The addresses of a request's pictures, in the order of their placeholders. Raises InvalidRequest for media of
    another kind, and for a picture of which only a name came.

    ``multi_modal_uuids`` are not looked at: what a client calls a picture could be another client's name for another
    one, so here its bytes name it.
    """
    media = wire.get("multi_modal_data") or {}
    if others := sorted(kind for kind, held in media.items() if held and kind != _IMAGES):
        raise InvalidRequest(f"the request brings {', '.join(others)}, expected images alone; send image_url")
    return tuple(_url(item) for item in media.get(_IMAGES) or ())


def _url(item: Any) -> str:
    url = item.get("Url") if isinstance(item, Mapping) else None
    if isinstance(url, str):
        return url
    if isinstance(item, Mapping) and "UuidOnly" in item:
        raise InvalidRequest("an image comes with a uuid alone, expected its url too: no worker keeps images by name")
    raise InvalidRequest("an image comes in a form that this worker does not read, expected an image_url with a url")


def check_placeholders(token_ids: Sequence[int], image_token_id: int, count: int) -> None:
    """Raises InvalidRequest unless the prompt has one placeholder for each of ``count`` pictures.

    More: the text of a message holds the placeholder itself, which the tokenizer takes for one. Fewer: the chat
    template left pictures out.
    """
    found = token_ids.count(image_token_id)
    if found != count:
        way_out = "leave the placeholder's text out of messages" if found > count else "see the model's chat template"
        raise InvalidRequest(
            f"the prompt has {found} image placeholders and the request {count} images, expected as many of both; "
            f"{way_out}"
        )


def expand(
    token_ids: Sequence[int], image_token_id: int, pictures: Sequence[Picture]
) -> tuple[list[int], list[MediaSpan]]:
    """The prompt with as many placeholders for each picture as its embedding has rows, and where they are.

    ``token_ids`` has one placeholder a picture: see :func:`check_placeholders`.
    """
    expanded: list[int] = []
    spans: list[MediaSpan] = []
    waiting = iter(pictures)
    for token_id in token_ids:
        if token_id != image_token_id:
            expanded.append(token_id)
            continue
        picture = next(waiting)
        spans.append(MediaSpan(len(expanded), picture.rows, picture.key, picture.grid))
        expanded += [image_token_id] * picture.rows
    return expanded, spans
