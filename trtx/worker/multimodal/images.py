"""The images and videos of a request as Dynamo sends them, and their placeholder ranges in the prompt.

The frontend puts one placeholder per media item into the prompt, in their order. The number of positions that each item
takes is known only from its embedding, so the worker expands the placeholders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
)  # Qwen3-VL's; its processor puts them around each step of a video

_EMBEDDING = ".safetensors"
_TYPE_CHARACTERS = 200  # length of the prefix of a data: URL that contains its media type

Encode = Callable[[str], list[int]]
"""Encodes text with the model's tokenizer: special tokens in the text are recognised, and none are added."""


@dataclass(frozen=True, slots=True)
class Placeholders:
    """The placeholder tokens of a model's media in a prompt; None for a kind that the model does not take."""

    image_token_id: int
    video_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """An image or a video as the client sent it."""

    url: str
    kind: Kind = "image"


@dataclass(frozen=True, slots=True)
class Picture:
    """The size of one image or video in a prompt, known from its embedding.

    ``rows`` is the number of prompt positions, ``grid`` is (t, h, w) in merged patches, ``clip`` is set for videos.
    """

    key: bytes
    rows: int
    grid: tuple[int, int, int] | None = None
    clip: Clip | None = None


def sent_media(wire: Mapping[str, Any], config: VisionConfig | Placeholders) -> tuple[Sent, ...]:
    """The request's images in the order of their placeholders, then its videos in the order of theirs.

    Raises InvalidRequest for media that the model does not take, and for items that consist of a uuid without a URL.
    ``multi_modal_uuids`` are ignored: two clients may use the same name for different images, so images are identified
    by their bytes.
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
    """Whether the URL names an embedding file, by the end of its path or by the media type of a ``data:`` URL.

    The content is not read.
    """
    if url[:5].lower() == "data:":
        return (
            url[5:_TYPE_CHARACTERS].partition(",")[0].partition(";")[0].lower().endswith(_EMBEDDING.removeprefix("."))
        )
    return url.partition("?")[0].partition("#")[0].lower().endswith(_EMBEDDING)


def _lost_audio(wire: Mapping[str, Any]) -> set[str]:
    """``{"input_audio"}`` if the messages contain audio, which Dynamo 1.6.1's frontend leaves out of the media.

    The frontend passes messages to a worker only if they contain other media; docs/request-fields.md describes the case
    without any.
    """
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
        raise InvalidRequest(f"{a_medium} has only a uuid, expected a url too: workers don't store media by name")
    raise InvalidRequest(f"{a_medium} has no url, expected one")


def check_counts(sent: Sequence[Sent], limits: MediaLimits) -> None:
    """Raises InvalidRequest for more media than a request may contain, and for videos that can't be decoded here."""
    videos = sum(one.kind == "video" for one in sent)
    if videos and not decodes_videos():
        raise InvalidRequest(f"the request brings a video, and {NO_DECODER}, or send frames as images")
    for what, count, most in (("images", len(sent) - videos, limits.max_images), ("videos", videos, limits.max_videos)):
        if count > most:
            raise InvalidRequest(f"the request brings {count} {what}, expected at most {most}")


def check_placeholders(token_ids: Sequence[int], config: VisionConfig | Placeholders, sent: Sequence[Sent]) -> None:
    """Raises InvalidRequest unless the prompt has exactly one placeholder per item of ``sent``.

    Too many placeholders: a message contains the placeholder's text, which the tokenizer turns into the token. Too few:
    the chat template dropped some.
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
    """The prompt with one placeholder token per embedding row, and the placeholder ranges.

    ``token_ids`` has one placeholder per item, and ``pictures`` are in the order of :func:`sent_media`. ``encode`` is
    needed for videos of models that take each step's time as text; raises InvalidRequest if it is missing then.
    """
    images = iter([one for one in pictures if one.clip is None])
    videos = iter([one for one in pictures if one.clip is not None])
    expanded: list[int] = []
    spans: list[MediaSpan] = []
    # the token after a video's placeholder that must be dropped, as _expand_with_times has written its own
    skipped: int | None = None
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
                spans.append(_span_with_times(video, len(expanded), config.tokens_per_second))
                expanded += [token_id] * video.rows
            else:
                skipped = _expand_with_times(video, token_id, encode, expanded, spans)
        else:
            expanded.append(token_id)
    return expanded, spans


def _span_with_times(video: Picture, start: int, tokens_per_second: int) -> MediaSpan:
    """Placeholder range of a Qwen2.5-VL video, whose temporal positions carry the time of each step."""
    import numpy as np

    assert video.clip is not None
    step = np.float32(tokens_per_second) * np.float32(video.clip.step_s)  # float32, as in transformers
    return MediaSpan(start, video.rows, video.key, video.grid, time_step=float(step))


def _expand_with_times(
    video: Picture, token_id: int, encode: Encode | None, expanded: list[int], spans: list[MediaSpan]
) -> int | None:
    """Expands a Qwen3-VL video: each step follows its time as text and has start and end marks of its own.

    Extends ``expanded`` and ``spans``. Returns the end mark that the template put after the video, if the caller has to
    drop it because each step now has its own.

    Matches transformers 4.57 and vLLM; transformers 5.23 keeps the template's marks around all steps.
    """
    assert video.clip is not None and video.grid is not None
    if encode is None:
        raise InvalidRequest("videos need a fast tokenizer, which this model lacks; send frames as images")
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
