"""The pictures and videos of a request, as Dynamo sends them, and their places in its prompt.

The frontend leaves one placeholder for each in the prompt, in their order; how many positions each takes is known only
once its embedding is, so the worker makes room for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtx.checkpoint.vision import VisionConfig
from trtx.config.video_decoder import NO_DECODER, decodes_videos
from trtx.engine.api import Clip, MediaSpan
from trtx.media import Kind, MediaLimits
from trtx.worker.requests.invalid_request import InvalidRequest

_AUDIO = "input_audio"
_KINDS: Mapping[str, Kind] = {"image_url": "image", "video_url": "video"}
_START, _END = (
    "<|vision_start|>",
    "<|vision_end|>",
)  # Qwen3-VL's, which its processor writes around each step of a video

_EMBEDDING = ".safetensors"
_TYPE_CHARACTERS = 200  # of a data: URL, in which its media type ends

Encode = Callable[[str], list[int]]
"""Of the model's tokenizer: text to ids, special tokens in it read as such, and none added."""


@dataclass(frozen=True, slots=True)
class Placeholders:
    """The tokens that stand for media in a prompt; of a kind that the model does not take, None."""

    image_token_id: int
    video_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """A picture or video as a client sent it."""

    url: str
    kind: Kind = "image"


@dataclass(frozen=True, slots=True)
class Picture:
    """What the embedding of a picture or video takes of a prompt. ``rows`` positions; ``grid``: (t, h, w) in merged
    patches; ``clip``: of a video."""

    key: bytes
    rows: int
    grid: tuple[int, int, int] | None = None
    clip: Clip | None = None


def sent_media(wire: Mapping[str, Any], config: VisionConfig | Placeholders) -> tuple[Sent, ...]:
    """A request's pictures in the order of their placeholders, then its videos in that of theirs. Raises
    InvalidRequest for media that the model does not take, and for one of which only a name came.

    ``multi_modal_uuids`` are not looked at: what a client calls a picture could be another client's name for another
    one, so here its bytes name it.
    """
    media = wire.get("multi_modal_data") or {}
    taken = [name for name, kind in _KINDS.items() if kind == "image" or config.video_token_id is not None]
    others = sorted({kind for kind, held in media.items() if held and kind not in taken} | _lost_audio(wire))
    if others:
        wanted = "images and videos" if len(taken) > 1 else "images"
        raise InvalidRequest(
            f"the request brings {', '.join(others)}, expected {wanted} alone: this model takes no other media; send "
            f"{' or '.join(taken)}"
        )
    return tuple(_sent(item, _KINDS[name]) for name in taken for item in media.get(name) or ())


def _sent(item: Any, kind: Kind) -> Sent:
    url = _url(item, kind)
    return Sent(url, "embedding" if kind == "image" and _names_an_embedding(url) else kind)


def _names_an_embedding(url: str) -> bool:
    """By its name alone: no file is looked at here. Of ``data:`` its media type's end."""
    if url[:5].lower() == "data:":
        return (
            url[5:_TYPE_CHARACTERS].partition(",")[0].partition(";")[0].lower().endswith(_EMBEDDING.removeprefix("."))
        )
    return url.partition("?")[0].partition("#")[0].lower().endswith(_EMBEDDING)


def _lost_audio(wire: Mapping[str, Any]) -> set[str]:
    """``input_audio``, which Dynamo 1.4.2's frontend leaves out of the media. It shows a worker the messages only where
    other media are in them: docs/request-fields.md says what becomes of one without any."""
    for message in (wire.get("extra_args") or {}).get("messages") or ():
        parts = message.get("content") if isinstance(message, Mapping) else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, Mapping) and part.get("type") == _AUDIO:
                return {_AUDIO}
    return set()


def _url(item: Any, kind: Kind) -> str:
    url = item.get("Url") if isinstance(item, Mapping) else None
    if isinstance(url, str):
        return url
    a_medium = "an image" if kind == "image" else "a video"
    if isinstance(item, Mapping) and "UuidOnly" in item:
        raise InvalidRequest(f"{a_medium} comes with a uuid alone, expected its url too: no worker keeps media by name")
    raise InvalidRequest(f"{a_medium} comes in a form that this worker does not read, expected one with a url")


def check_counts(sent: Sequence[Sent], limits: MediaLimits) -> None:
    """Raises InvalidRequest for more media than a request may bring, and for videos where nothing decodes them."""
    videos = sum(one.kind == "video" for one in sent)
    if videos and not decodes_videos():
        raise InvalidRequest(f"the request brings a video, and {NO_DECODER}, or send frames as images")
    for what, count, most in (("images", len(sent) - videos, limits.max_images), ("videos", videos, limits.max_videos)):
        if count > most:
            raise InvalidRequest(f"the request brings {count} {what}, expected at most {most}")


def check_placeholders(token_ids: Sequence[int], config: VisionConfig | Placeholders, sent: Sequence[Sent]) -> None:
    """Raises InvalidRequest unless the prompt has one placeholder for each of ``sent``.

    More: the text of a message holds the placeholder itself, which the tokenizer takes for one. Fewer: the chat
    template left some out.
    """
    videos = sum(one.kind == "video" for one in sent)
    for kind, token_id, count in (
        ("image", config.image_token_id, len(sent) - videos),
        ("video", config.video_token_id, videos),
    ):
        found = token_ids.count(token_id)
        if found != count and token_id is not None:
            way_out = "leave the placeholder's text out of messages" if found > count else "see the model's template"
            raise InvalidRequest(
                f"the prompt has {found} {kind} placeholders and the request {count} {kind}s, expected as many of "
                f"both; {way_out}"
            )


def expand(
    token_ids: Sequence[int], config: VisionConfig, pictures: Sequence[Picture], encode: Encode | None = None
) -> tuple[list[int], list[MediaSpan]]:
    """The prompt with as many placeholders for each of ``pictures`` as its embedding has rows, and where they are.

    ``token_ids`` has one placeholder for each, and ``pictures`` are in the order of :func:`sent_media`. ``encode``: for
    videos of models that are told in text when a step of one is. Raises InvalidRequest where that is needed and not
    there.
    """
    images = iter([one for one in pictures if one.clip is None])
    videos = iter([one for one in pictures if one.clip is not None])
    expanded: list[int] = []
    spans: list[MediaSpan] = []
    skipped: int | None = None  # which token that stood behind a video is none of the prompt's any more
    for token_id in token_ids:
        if token_id == skipped:
            skipped = None
            continue
        skipped = None
        if token_id == config.image_token_id:
            picture = next(images)
            spans.append(MediaSpan(len(expanded), picture.rows, picture.key, picture.grid))
            expanded += [token_id] * picture.rows
        elif token_id == config.video_token_id:
            video = next(videos)
            if config.tokens_per_second is not None:
                spans.append(_timed(video, len(expanded), config.tokens_per_second))
                expanded += [token_id] * video.rows
            else:
                skipped = _told(video, token_id, encode, expanded, spans)
        else:
            expanded.append(token_id)
    return expanded, spans


def _timed(video: Picture, start: int, tokens_per_second: int) -> MediaSpan:
    """Qwen2.5-VL: positions in time say when a step is."""
    assert video.clip is not None
    step = np.float32(tokens_per_second) * np.float32(video.clip.step_s)  # as transformers computes it
    return MediaSpan(start, video.rows, video.key, video.grid, time_step=float(step))


def _told(
    video: Picture, token_id: int, encode: Encode | None, expanded: list[int], spans: list[MediaSpan]
) -> int | None:
    """Qwen3-VL: each step stands behind its time in text, between marks of its own. Extends ``expanded`` and ``spans``;
    returns the mark that the template put behind the video, as those around it are in place of none now.

    As transformers 4.57 and vLLM do; transformers 5.23 leaves the template's marks around all of them.
    """
    assert video.clip is not None and video.grid is not None
    if encode is None:
        raise InvalidRequest("videos need a fast tokenizer, which this model has not; send frames as images")
    (start,), (end,) = encode(_START), encode(_END)
    has_marks = expanded[-1:] == [start]
    if has_marks:
        expanded.pop()
    steps, height, width = video.grid
    rows = height * width
    for step, at_s in enumerate(video.clip.at_s):
        expanded += [*encode(f"<{at_s:.1f} seconds>"), start]
        spans.append(
            MediaSpan(len(expanded), rows, video.key, (1, height, width), first=step * rows, rows=steps * rows)
        )
        expanded += [*[token_id] * rows, end]
    return end if has_marks else None
