"""Keys of media items by content: items with equal keys have the same embedding."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

from blake3 import blake3

from trtx.config.video_decoder import PACKAGE

_DOMAIN = b"trtx medium 1"
_DOCUMENTS = ("preprocessor_config.json", "processor_config.json")
_OF_VIDEOS = ("video_preprocessor_config.json",)
_DECODED_BY = ("pillow", "transformers", "numpy")
_VIDEOS_BY = (PACKAGE,)
DECODING = 1
"""Version of the pixels that ``decoder/pictures.py`` produces. Raise it for every change of a pixel."""
EMBEDDING_READING = 1
"""The same for ``decoder/embeddings.py``."""
VIDEO_DECODING = 2
"""The same for ``decoder/videos.py`` and ``decoder/sampling.py``."""


def content_key(data: bytes, *, model: str, options: str) -> bytes:
    """BLAKE3-256 over a domain tag, the model, the preprocessing settings (:func:`processor_options`) and the file.

    Each part is preceded by its length, so that different splits of the same bytes have different keys. Releases the
    GIL and hashes about 7 GB/s; call it in a thread for more than a few megabytes.
    """
    hasher = blake3(_DOMAIN)
    for part in (model.encode(), options.encode(), data):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def processor_options(model_dir: Path) -> str:
    """Everything that determines an image's pixels: the checkpoint's processor, package versions, trtx's decoding.

    Reads two small files and imports none of the packages. Raises OSError, or ValueError for a document that is not
    JSON.
    """
    return json.dumps({"decoding": DECODING, **_stated(model_dir, _DOCUMENTS, _DECODED_BY)}, sort_keys=True)


def video_options(model_dir: Path, max_frames: int) -> str:
    """The same for a video, of which at most ``max_frames`` are used. Differs from every image's options."""
    stated = _stated(model_dir, _DOCUMENTS + _OF_VIDEOS, _DECODED_BY + _VIDEOS_BY)
    return json.dumps({"video_decoding": VIDEO_DECODING, "frames": max_frames, **stated}, sort_keys=True)


def embedding_options() -> str:
    """The same for an embedding that the client computed."""
    return json.dumps({"embedding": EMBEDDING_READING})


def _stated(model_dir: Path, documents: tuple[str, ...], packages: tuple[str, ...]) -> dict[str, Any]:
    found = {name: json.loads(path.read_bytes()) for name in documents if (path := model_dir / name).is_file()}
    return {"packages": {name: metadata.version(name) for name in packages}, **found}
