"""The specification of a run: modes, topology, load and gate, from a sweep file and flags."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from trtx.bench import LoadSpec
from trtx.config import Mode, TopologySpec
from trtx.config.hosts import Certificates, Password, parse_auth
from trtx.config.option_field import OptionField
from trtx.config.topology import Name
from trtx.config.wording import quoted, shown_address
from trtx.errors import UsageError
from trtx.experiment.bench.axes import Axes, NamedTopology, expand
from trtx.experiment.gate_spec import GateSpec
from trtx.experiment.scoring_spec import ScoringSpec
from trtx.planes.credentials import EtcdAuth, check_endpoints
from trtx.planes.secret_files import judge_secrets, look_at_secrets
from trtx.topology import body_mib

MAX_GPUS = 100_000  # at one address
MAX_CELLS = 10_000  # limits the cost of a typing mistake
MAX_GPU_HOUR_PRICE = 1e9  # in any currency
ATTACHED = "attached"  # mode of a deployment that trtx doesn't serve


Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]  # used as a directory name


class Attach(BaseModel):
    """A deployment that trtx measures but doesn't serve."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    model: Name | None = None  # the served model name; None: the only one in /v1/models
    tokenizer: Name | None = None  # directory or Hugging Face name; None: the model's name
    gpu_count: int | None = Field(default=None, ge=0, le=MAX_GPUS)  # None: as published by the deployment
    # Endpoints at which its workers are registered; empty: not queried.
    etcd: Annotated[tuple[str, ...], OptionField(since=7, before=[])] = Field(default=(), max_length=16)
    # Files in the format of trtx serve join.
    etcd_auth: Annotated[str | None, OptionField(since=7, before=None)] = None

    @model_validator(mode="after")
    def _etcd_and_its_files(self) -> Self:
        if self.etcd_auth is not None and not self.etcd:
            raise ValueError("etcd_auth has no effect without etcd; add it, or leave it out")
        if self.etcd:
            try:
                auth = self.etcd_files()
                check_endpoints(self.etcd, uses_tls=auth is not None and auth.ca is not None)
            except UsageError as error:
                raise ValueError(str(error)) from error
        return self

    def etcd_files(self) -> EtcdAuth | None:
        """The credentials for etcd. Raises UsageError for a kind that etcd doesn't accept."""
        if self.etcd_auth is None:
            return None
        match parse_auth("etcd_auth (--etcd-auth)", self.etcd_auth, Path.cwd()):
            case Certificates(ca=ca, certificate=certificate, key=key):
                return EtcdAuth(ca=ca, certificate=certificate, key=key)
            case Password(username=username, password_file=file):
                return EtcdAuth(username=username, password_file=file)
        raise UsageError("etcd_auth has a token, which etcd does not accept; use certificates or a password")

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings if other users of this machine can access the files of ``etcd_auth``. Raises UsageError as above."""
        amiss = judge_secrets(look_at_secrets(self.etcd_files(), None))
        return tuple(str(one) for one in amiss if one.severity == "warning")

    @field_validator("url")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if "@" in value.rpartition("//")[2].partition("/")[0]:  # the URL isn't shown, because it contains a password
            raise ValueError("url has a user name or password, which would appear in every report; leave them out")
        if not _is_address(value):
            raise ValueError(
                f"url {shown_address(value)} is not an address; expected for example http://127.0.0.1:8000"
            )
        if "?" in value or "#" in value:
            address = value.partition("#")[0].partition("?")[0]
            raise ValueError(f"url {quoted(address)} has a query, which is not sent with requests; leave it out")
        return value.rstrip("/").removesuffix("/v1").rstrip("/")  # OpenAI clients are configured with the suffix /v1


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port  # urlsplit validates the port only on access
    except ValueError:  # such as http://[::1 or an invalid port
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and url.isprintable() and " " not in url


class ExperimentSpec(BaseModel):
    """The content of a sweep file; flags of the same names override it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(default="bench", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    modes: tuple[Mode, ...] = Field(default=("agg",), min_length=1)
    topology: TopologySpec = Field(
        default_factory=lambda: TopologySpec.model_validate({"port": 0})
    )  # its mode is set from modes, one after the other
    axes: Axes = Field(default_factory=dict)  # topology fields with several values
    arms: dict[Label, TopologySpec] = Field(default_factory=dict)  # topologies by label, instead of modes and axes
    order: Literal["in turn", "abba"] = "in turn"  # abba: each block restarts every topology, in alternating order
    max_cells: int = Field(default=64, ge=1, le=MAX_CELLS)
    load: LoadSpec = Field(default_factory=LoadSpec)
    attach: Attach | None = None
    gate: GateSpec = Field(default_factory=GateSpec)
    # Price of one GPU for an hour, in any currency, from which the cost of tokens is computed.
    gpu_hour_price: Annotated[float | None, OptionField(since=10, before=None)] = Field(
        default=None, ge=0, le=MAX_GPU_HOUR_PRICE, allow_inf_nan=False
    )
    # Scores every topology after its cells.
    eval: Annotated[ScoringSpec | None, OptionField(since=4, before=None)] = None

    @field_validator("modes")
    @classmethod
    def _distinct(cls, value: tuple[Mode, ...]) -> tuple[Mode, ...]:
        if len(set(value)) != len(value):
            raise ValueError(f"modes {','.join(value)} names a mode twice; expected each once")
        return value

    @model_validator(mode="after")
    def _sound(self) -> ExperimentSpec:
        if self.attach is not None:
            if shaped := [name for name, value in (("axes", self.axes), ("arms", self.arms)) if value]:
                raise ValueError(
                    f"{shaped[0]} configure what trtx serves, but attach measures a running server; leave them out"
                )
        elif self.topology.port and len(self.topologies) > 1:
            raise ValueError(
                f"port {self.topology.port} can't serve {' and '.join(one.label for one in self.topologies)} of one "
                "run; leave the port out, and each topology takes a free one"
            )
        for one in self.topologies if self.load.image_batch_size else ():
            self._refuse_images_beyond(one)
        self._refuse_unstreamed()
        if self.cell_count > self.max_cells:
            raise ValueError(
                f"{len(self.labels)} topologies at {self.load.load_count} loads make {self.cell_count} cells, and "
                f"max_cells is {self.max_cells}; remove values from an axis, or raise max_cells"
            )
        return self

    def _refuse_unstreamed(self) -> None:
        """Raises ValueError if the gate judges a streaming metric although the load doesn't stream."""
        judged = [objective.metric for objective in self.gate.objectives]
        judged += self.gate.compared if self.gate.limit is not None else ()
        if not self.load.streaming and (lacking := [metric.name for metric in judged if metric.metric.of_stream]):
            raise ValueError(
                f"gate judges {', '.join(lacking)}, which only streamed answers have, but load.streaming is false; "
                "judge request_latency or a throughput, or set load.streaming to true"
            )

    def _refuse_images_beyond(self, topology: NamedTopology) -> None:
        """Raises ValueError if requests have more or larger images than the topology's workers accept."""
        load, media = self.load, topology.spec.media
        count = load.image_batch_size * load.session_turns_mean  # a turn's prompt includes all earlier turns
        if count > media.max_images:
            raise ValueError(
                f"load.image_batch_size makes requests of {count} images, and media.max_images of {topology.label} is "
                f"{media.max_images}; ask for fewer, or allow more"
            )
        pixels = load.image_width_mean * load.image_height_mean
        if pixels > media.max_image_pixels:
            raise ValueError(
                f"load.image_width_mean and image_height_mean make images of {pixels} pixels, and "
                f"media.max_image_pixels of {topology.label} is {media.max_image_pixels}; ask for smaller ones, or "
                "allow more"
            )
        self._refuse_bytes_beyond(topology, count)

    def _refuse_bytes_beyond(self, topology: NamedTopology, images: int) -> None:
        """Raises ValueError if image files are too large: aiperf sends each in its request, as a data: URL."""
        media, least = topology.spec.media, self.load.least_image_bytes
        if least > media.max_media_bytes:
            raise ValueError(
                f"load.image_width_mean and image_height_mean make files of {least} bytes at least, and "
                f"media.max_media_bytes of {topology.label} is {media.max_media_bytes}; ask for smaller images, or for "
                "image_format jpeg, or allow more"
            )
        body, most = images * (-(-least // 3) * 4), body_mib(media)
        if body > most << 20:
            raise ValueError(
                f"load.image_batch_size makes requests of at least {body} bytes, with {images} images each, but the "
                f"frontend of {topology.label} takes bodies of {most} MiB; ask for fewer or smaller images, or raise "
                "media.max_media_bytes, which sets that limit"
            )

    @property
    def topologies(self) -> tuple[NamedTopology, ...]:
        """The topologies that trtx serves and measures in turn; empty for an attached run."""
        if self.attach is not None:
            return ()
        if self.arms:
            return tuple(NamedTopology(label, spec) for label, spec in self.arms.items())
        return expand(self.modes, self.topology, self.axes)

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of everything that is measured, as in the report."""
        return (ATTACHED,) if self.attach is not None else tuple(one.label for one in self.topologies)

    @property
    def cell_count(self) -> int:
        return len(self.labels) * self.load.load_count

    def to_json(self) -> dict[str, Any]:
        """Plain values, including the loads that result from defaults."""
        document = self.model_dump(mode="json")
        document["load"]["cells"] = [asdict(load) for load in self.load.loads]
        document["load"]["prompts"] = self.load.description
        document["topologies"] = list(self.labels)
        return document
