"""Converts images from TensorRT-LLM's prompts into files for the image pool of ``trtx.media``."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from trtx.torch_engine.llmapi.request_errors import RequestError
from trtx.torch_engine.llmapi.values import shown

_DATA, _OPTIONS = "multi_modal_data", "mm_processor_kwargs"
_TEXT = ("prompt", "prompt_token_ids")  # no image depends on these
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


def pictures_of(inputs: Any) -> list[Any]:
    """Returns the images of a prompt, at least one. Raises RequestError for inputs that an encoder can't use."""
    if not isinstance(inputs, Mapping):
        raise RequestError(f"inputs are {shown(inputs)}; expected a dict with {_DATA}")
    given = {name: value for name, value in inputs.items() if value is not None}
    if given.get(_OPTIONS):
        raise RequestError(f"{_OPTIONS} are not supported: the checkpoint's own options hold; leave them out")
    if others := sorted(given.keys() - {*_TEXT, _DATA, _OPTIONS}):
        raise RequestError(f"inputs have {', '.join(others)}, which an encoder does not use; expected {_DATA} alone")
    data = given.get(_DATA)
    if not isinstance(data, Mapping) or "image" not in data:
        raise RequestError(f"{_DATA} is {shown(data)}; expected a dict with image")
    if others := sorted(str(kind) for kind, held in data.items() if kind != "image" and held):
        raise RequestError(f"{_DATA} has {', '.join(others)}, and this encoder takes image alone")
    images = data["image"]
    found = list(images) if isinstance(images, (list, tuple)) else [images]
    if not found:
        raise RequestError(f"{_DATA} has no image; expected at least one")
    return found


def png_of(picture: Any) -> bytes:
    """Encodes an image as PNG, without loss.

    Raises RequestError unless it is a Pillow image or uint8 ``[height, width, 3]``.
    """
    import numpy as np
    from PIL import Image

    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3 or 0 in picture.shape:
            raise RequestError(
                f"an image is an array of {picture.dtype} of shape {list(picture.shape)}; expected uint8 of "
                "[height, width, 3]"
            )
        picture = Image.fromarray(np.ascontiguousarray(picture))
    if not isinstance(picture, Image.Image):
        raise RequestError(f"an image is {shown(picture)}; expected a Pillow image or an array of numpy")
    file = io.BytesIO()
    try:
        kept = picture if picture.mode in _PNG_MODES else picture.convert("RGB")
        kept.save(file, "PNG", compress_level=0)
    except (OSError, ValueError) as error:
        raise RequestError(
            f"an image of mode {picture.mode} can't be used ({error}); expected one that PNG can hold, or RGB"
        ) from error
    return file.getvalue()
