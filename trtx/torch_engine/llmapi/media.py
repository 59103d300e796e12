"""Media of a prompt on the caller's side: parses TensorRT-LLM's prompt dict, and tracks which embeddings are in use."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from math import prod
from typing import TYPE_CHECKING, Any

from trtx.checkpoint.vision import VisionConfig
from trtx.ipc.shared_tensor import SharedTensor, SharedTensorError, remove_shared, share
from trtx.torch_engine.llmapi.client import EngineClient
from trtx.torch_engine.llmapi.request_errors import RequestError, RequestFailed, typed
from trtx.torch_engine.llmapi.values import is_text, shown
from trtx.torch_engine.messages import MEDIA_KEY_BYTES, MediaSpan

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch

EMBEDDINGS, DATA, OPTIONS, UUIDS = (
    "multi_modal_embeddings",
    "multi_modal_data",
    "mm_processor_kwargs",
    "multi_modal_uuids",
)
_IMAGE, _GRIDS = "image", "image_grid_thw"


@dataclass(frozen=True, slots=True)
class PromptMedia:
    """Media of one prompt. ``embeddings``: the embeddings that the engine must have while the request runs, by key."""

    spans: list[MediaSpan] = field(default_factory=list)
    embeddings: dict[bytes, torch.Tensor] = field(default_factory=dict)


def read_media(
    inputs: Mapping[str, Any], token_ids: list[int], vision: VisionConfig | None
) -> tuple[list[int], PromptMedia]:
    """Returns the prompt with one placeholder for each embedding row, and its media.

    ``vision``: None for a text model. The prompt may have one placeholder for each image, which is expanded, or one for
    each row. Raises RequestError with one sentence for inputs that can't be honoured.
    """
    given = {key: value for key, value in inputs.items() if value is not None and not _is_empty(value)}
    for key in given.keys() - {"prompt", "prompt_token_ids", EMBEDDINGS, DATA, OPTIONS, UUIDS}:
        raise RequestError(f"inputs have {key}, not supported by the torch engine; leave it out")
    if not given.keys() & {EMBEDDINGS, DATA, OPTIONS, UUIDS}:
        return token_ids, PromptMedia()
    if vision is None:
        asked = ", ".join(sorted(given.keys() - {"prompt", "prompt_token_ids"}))
        raise RequestError(f"inputs have {asked}, and the model is a text model; send text alone")
    if DATA in given:
        raise RequestError(
            f"inputs have {DATA}, which the LLM of the torch engine does not encode; send images to trtx serve, or "
            f"pass their embeddings as {EMBEDDINGS}"
        )
    if OPTIONS in given:
        raise RequestError(
            f"inputs have {OPTIONS}, which has no effect on images that are given as {EMBEDDINGS}; leave it out"
        )
    items = _items(given.get(EMBEDDINGS))
    grids = _grids(given[EMBEDDINGS].get(_GRIDS), items, vision)
    keys = _keys(items, grids, given.get(UUIDS))
    token_ids, starts = _placed(token_ids, [int(item.shape[0]) for item in items], vision.image_token_id)
    spans = [
        MediaSpan(start, int(item.shape[0]), key, grid)
        for start, item, key, grid in zip(starts, items, keys, grids, strict=True)
    ]
    return token_ids, PromptMedia(spans, dict(zip(keys, items, strict=True)))


def _is_empty(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple)) and not value


def _items(given: Any) -> list[torch.Tensor]:
    import torch

    if not isinstance(given, Mapping) or given.get(_IMAGE) is None or given.keys() - {_IMAGE, _GRIDS}:
        kinds = sorted(map(str, given)) if isinstance(given, Mapping) else shown(given)
        raise RequestError(
            f"{EMBEDDINGS} is {kinds}; expected a dict with {_IMAGE!r}, a list of tensors, and {_GRIDS!r} where the "
            "model's positions need it: the torch engine computes no other kind"
        )
    items = given[_IMAGE]
    wrong: Any = items
    if isinstance(items, (list, tuple)) and items:
        unfit = [one for one in items if not isinstance(one, torch.Tensor) or one.dim() != 2 or not one.shape[0]]
        if not unfit:
            return list(items)
        wrong = unfit[0]
    what = f"a tensor of shape {list(wrong.shape)}" if isinstance(wrong, torch.Tensor) else shown(wrong)
    raise RequestError(f"{EMBEDDINGS}[{_IMAGE!r}] is or holds {what}; expected a list of tensors [rows, hidden]")


def _grids(given: Any, items: Sequence[torch.Tensor], vision: VisionConfig) -> list[tuple[int, int, int] | None]:
    """Grid (t, h, w) of each image in rows, from ``image_grid_thw``, which is in patches as in transformers."""
    if given is None:
        if vision.tokens_per_image is None:
            raise RequestError(
                f"{EMBEDDINGS} lacks {_GRIDS}; expected t, h and w of each image in patches, as this model's positions "
                "depend on them and the number of rows does not determine them"
            )
        return [None] * len(items)
    stated = typed(list[tuple[int, int, int]], given.tolist() if hasattr(given, "tolist") else given, _GRIDS)
    if len(stated) != len(items):
        raise RequestError(
            f"{_GRIDS} has {len(stated)} entries for {len(items)} images; expected one entry for each image"
        )
    merge = vision.spatial_merge
    grids: list[tuple[int, int, int] | None] = []
    for (t, h, w), item in zip(stated, items, strict=True):
        if min(t, h, w) < 1 or h % merge or w % merge or prod((t, h // merge, w // merge)) != item.shape[0]:
            raise RequestError(
                f"{_GRIDS} has {t} x {h} x {w} for an embedding of {item.shape[0]} rows; expected a grid in patches, "
                f"where {merge} x {merge} patches make one row"
            )
        grids.append((t, h // merge, w // merge))
    return grids


def _keys(items: Sequence[torch.Tensor], grids: Sequence[tuple[int, int, int] | None], uuids: Any) -> list[bytes]:
    """Keys from contents, grids and uuids. Items with equal keys are the same to the engine, which shares their KV."""
    import torch

    names: list[str | None] = [None] * len(items)
    if uuids is not None:
        stated = typed(dict[str, list[str | None]], uuids, UUIDS)
        names = stated.get(_IMAGE, [])
        if stated.keys() - {_IMAGE} or len(names) != len(items) or not all(is_text(name or "") for name in names):
            raise RequestError(f"{UUIDS} is {shown(uuids)}; expected {_IMAGE!r} with a text or None for each image")
    keys = []
    for item, grid, name in zip(items, grids, names, strict=True):
        said = repr((str(item.dtype), tuple(item.shape), grid, name)).encode()
        digest = blake2b(said, digest_size=MEDIA_KEY_BYTES, person=b"embedding")
        digest.update(item.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        keys.append(digest.digest())
    return keys


def _placed(token_ids: list[int], rows: Sequence[int], placeholder: int) -> tuple[list[int], list[int]]:
    """Returns (prompt with one placeholder for each row, start of each image in it)."""
    places = [at for at, token_id in enumerate(token_ids) if token_id == placeholder]
    starts: list[int] = []
    if len(places) == len(rows):
        expanded: list[int] = []
        before = 0
        for place, count in zip(places, rows, strict=True):
            expanded += token_ids[before:place]
            starts.append(len(expanded))
            expanded += [placeholder] * count
            before = place + 1
        return expanded + token_ids[before:], starts
    if len(places) != sum(rows):
        raise RequestError(
            f"the prompt has {len(places)} placeholders of an image (token {placeholder}) and {len(rows)} images of "
            f"{sum(rows)} rows; expected one for each image or for each row"
        )
    taken = 0
    for index, count in enumerate(rows):
        mine = places[taken : taken + count]
        if mine[-1] - mine[0] + 1 != count:
            raise RequestError(
                f"the {count} placeholders of image {index} do not follow each other, from token {mine[0]} to "
                f"{mine[-1]}; expected adjacent placeholders for each image"
            )
        starts.append(mine[0])
        taken += count
    return list(token_ids), starts


class EmbeddingUses:
    """Puts each embedding into the engine once, and keeps it while an open request uses it. Thread-safe."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._uses: Counter[bytes] = Counter()
        self._lock = threading.Lock()

    def acquire(self, embeddings: Mapping[bytes, torch.Tensor]) -> None:
        """Puts embeddings or counts one more use. Raises RequestFailed, and keeps none, if one can't be written."""
        with self._lock:
            for index, (key, tensor) in enumerate(embeddings.items()):
                if not self._uses[key]:
                    try:
                        shared = share(tensor)
                    except SharedTensorError as error:
                        self._release(list(embeddings)[:index])
                        raise RequestFailed(f"an embedding can't be given to the engine: {error}") from error
                    self._client.put_embedding(key, shared).add_done_callback(partial(_remove, shared))
                self._uses[key] += 1

    def release(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._release(keys)

    def _release(self, keys: Sequence[bytes]) -> None:
        self._uses.subtract(keys)
        if unused := [key for key in keys if not self._uses[key]]:
            for key in unused:
                del self._uses[key]
            self._client.drop_embeddings(unused)


def _remove(shared: SharedTensor, answer: Future[None]) -> None:
    with suppress(Exception):
        answer.exception()  # each sequence that needs it gets its own error
    remove_shared(shared)
