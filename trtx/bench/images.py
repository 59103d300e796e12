"""The images that aiperf generates for a load's requests. Fields are named after aiperf 0.13.0's flags."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trtx.bench.load_field import LoadField
from trtx.config.option_field import field_records

MAX_IMAGES = 1_000  # per request
MAX_IMAGE_SIDE = 16_384  # pixels; a noise image of this size has 800 MB before compression
ImageSource = Literal["noise", "assets"]
ImageFormat = Literal["png", "jpeg", "random"]

_SINCE = 6  # version of run.lock.yaml
# Per pixel of noise, as aiperf 0.13.0 writes it: PNG can't compress it; JPEG at quality 85 takes 1.58 (Pillow 12.3).
_LEAST_BYTES_PER_PIXEL = {"png": 3.0, "jpeg": 1.55, "random": 3.0}


class Images(BaseModel):
    """The images of every request, as given by flags or YAML. A batch size of 0 means no images."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image_batch_size: Annotated[
        int,
        LoadField(
            help="Images per request or session turn.",
            panel="Images",
            ignored=("dataset",),
            since=_SINCE,
            before=0,
        ),
    ] = Field(default=0, ge=0, le=MAX_IMAGES)
    image_width_mean: Annotated[
        int,
        LoadField(
            help="Mean width of images, in pixels.",
            panel="Images",
            ignored=("dataset", "no images"),
            since=_SINCE,
            before=512,
        ),
    ] = Field(default=512, ge=1, le=MAX_IMAGE_SIDE)
    image_width_stddev: Annotated[
        int,
        LoadField(
            help="Standard deviation of the width of images, in pixels.",
            panel="Images",
            ignored=("dataset", "no images"),
            flag="--image-width-stddev",
            since=_SINCE,
            before=0,
        ),
    ] = Field(default=0, ge=0, le=MAX_IMAGE_SIDE)
    image_height_mean: Annotated[
        int,
        LoadField(
            help="Mean height of images, in pixels.",
            panel="Images",
            ignored=("dataset", "no images"),
            since=_SINCE,
            before=512,
        ),
    ] = Field(default=512, ge=1, le=MAX_IMAGE_SIDE)
    image_height_stddev: Annotated[
        int,
        LoadField(
            help="Standard deviation of the height of images, in pixels.",
            panel="Images",
            ignored=("dataset", "no images"),
            flag="--image-height-stddev",
            since=_SINCE,
            before=0,
        ),
    ] = Field(default=0, ge=0, le=MAX_IMAGE_SIDE)
    image_format: Annotated[
        ImageFormat,
        LoadField(
            help="File format of images: png, jpeg, or random for a mix.",
            panel="Images",
            metavar="FORMAT",
            ignored=("dataset", "no images"),
            since=_SINCE,
            before="png",
        ),
    ] = "png"
    image_source: Annotated[
        ImageSource,
        LoadField(
            help="noise: every image differs. assets: four photos of aiperf, repeated; without a standard "
            "deviation each is always the same file.",
            panel="Images",
            metavar="noise|assets",
            ignored=("dataset", "no images"),
            since=_SINCE,
            before="noise",
        ),
    ] = "noise"

    @model_validator(mode="after")
    def _of_images(self) -> Images:
        if self.image_batch_size:
            return self
        for name in field_records(Images):
            if getattr(self, name) != Images.model_fields[name].default:
                raise ValueError(f"{name} has no effect while image_batch_size is 0; give each request some, or none")
        return self

    @property
    def image_words(self) -> tuple[str, ...]:
        """aiperf's image arguments, except those that a field declares; empty without images."""
        if not self.image_batch_size:
            return ()  # aiperf 0.13.0 sends an image as soon as a size is given
        return (
            "--image-batch-size", str(self.image_batch_size),
            "--image-width-mean", str(self.image_width_mean),
            "--image-height-mean", str(self.image_height_mean),
            "--image-format", self.image_format,
            "--image-source", self.image_source,
        )  # fmt: skip

    @property
    def least_image_bytes(self) -> int:
        """Minimum file size of an image of mean dimensions (of a PNG if the format is random).

        0 without images, or if the images are photos.
        """
        if not self.image_batch_size or self.image_source != "noise":
            return 0
        return int(self.image_width_mean * self.image_height_mean * _LEAST_BYTES_PER_PIXEL[self.image_format])

    @property
    def repeats_images(self) -> bool:
        """Whether requests use the same images repeatedly."""
        return bool(self.image_batch_size) and self.image_source != "noise"

    @property
    def images_description(self) -> str:
        """A short description for reports; empty without images."""
        if not self.image_batch_size:
            return ""
        width, height = (
            f"{mean} ± {stddev}" if stddev else str(mean)
            for mean, stddev in (
                (self.image_width_mean, self.image_width_stddev),
                (self.image_height_mean, self.image_height_stddev),
            )
        )
        count = "1 image" if self.image_batch_size == 1 else f"{self.image_batch_size} images"
        what = "of 4 photos" if self.repeats_images else "of noise"
        kind = "PNG or JPEG" if self.image_format == "random" else self.image_format.upper()
        return f"{count} {what} a turn, {width} × {height} pixels, {kind}"
