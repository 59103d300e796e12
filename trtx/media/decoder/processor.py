"""A checkpoint's own image processor, as transformers has it, on Pillow and numpy."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from trtx.errors import UsageError
from trtx.media.errors import MediaError
from trtx.media.messages import Grid

logger = logging.getLogger(__name__)

_KNOWN = {"pixel_values", "image_grid_thw"}


class ImageProcessor:
    """Raises UsageError for a checkpoint whose processor can't be had, or gives what no encoder here takes."""

    def __init__(self, model_dir: Path) -> None:
        # transformers takes its absence as it is, and these processors use none of it: 75 MB and 1 s for a process
        # with transformers 5.23 instead of 380 MB and 4 s.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        try:
            from transformers import AutoImageProcessor

            self._processor = AutoImageProcessor.from_pretrained(
                model_dir, backend="pil", trust_remote_code=False, local_files_only=True
            )
        except Exception as error:
            raise UsageError(
                f"{model_dir} has no image processor that loads without torchvision ({type(error).__name__}: {error}); "
                "expected a preprocessor_config.json of a class that transformers has on Pillow"
            ) from error
        try:
            self.prepare(Image.new("RGB", (64, 48), (255, 255, 255)), "a white picture")
        except MediaError as error:
            raise UsageError(f"the image processor of {model_dir} fails: {error}") from error

    def prepare(self, picture: Image.Image, label: str) -> tuple[np.ndarray, Grid | None]:
        """float32 ``pixel_values`` of one RGB picture, shaped as the model's class wants them, and its grid.

        Raises MediaError 422 for what the processor does not take; UsageError for an output that is not known.
        """
        try:
            found = self._processor(images=[picture], return_tensors="np")
        except MemoryError:
            raise
        except Exception:
            logger.exception("the image processor failed on %s of %dx%d pixels", label, *picture.size)
            width, height = picture.size
            raise MediaError(422, f"{label} has {width}x{height} pixels, which this model can't take") from None
        if unknown := set(found) - _KNOWN:
            raise UsageError(
                f"the image processor {type(self._processor).__name__} gives {', '.join(sorted(unknown))}, which no "
                f"encoder of trtx takes; expected {' and '.join(sorted(_KNOWN))} alone"
            )
        pixels = np.ascontiguousarray(found["pixel_values"], dtype=np.float32)
        grids = found.get("image_grid_thw")
        if grids is None:
            return pixels, None
        time, height, width = (int(one) for one in grids[0])
        return pixels, (time, height, width)
